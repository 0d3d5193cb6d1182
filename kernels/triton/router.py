"""Choice of experts from a router's logits. T tokens, E experts in G groups of X, A chosen.

One warp holds the scores of a token as [G, X]. Groups and experts are chosen one after the other,
each time the largest that is left; of equals the lowest id. The bias only chooses.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from batchmla.kernels.ops import RouterDims, Scoring
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.router_logits import router_logits

SIGMOID = tl.constexpr(0)
SOFTMAX = tl.constexpr(1)
ROOT = tl.constexpr(2)  # sqrt(softplus)


@triton.jit
def _log1p(y):
    """log(1 + y) for y in [0, 1]: 2 artanh(y / (2 + y)) as a series, 1e-8 of the value."""
    z = y / (2.0 + y)
    square = z * z
    series = 1.0 / 15 * square + 1.0 / 13
    series = series * square + 1.0 / 11
    series = series * square + 1.0 / 9
    series = series * square + 1.0 / 7
    series = series * square + 1.0 / 5
    series = series * square + 1.0 / 3
    return 2.0 * z * (series * square + 1.0)


@triton.jit
def _score(logits, inside, SCORING: tl.constexpr):
    """Scores of one token's logits [G, X]; of those not inside 0."""
    if SCORING == SOFTMAX:
        most = tl.max(tl.max(tl.where(inside, logits, float("-inf")), axis=1), axis=0)
        powers = tl.where(inside, tl.exp(logits - most), 0.0)
        scores = powers / tl.sum(tl.sum(powers, axis=1), axis=0)
    elif SCORING == SIGMOID:
        scores = tl.where(inside, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    else:
        softplus = tl.where(logits < 0, 0.0, logits)  # what is no number stays none
        softplus += _log1p(tl.exp(-tl.abs(logits)))
        scores = tl.where(inside, tl.sqrt(softplus), 0.0)
    return scores


@triton.jit
def _largest(values, numbers, is_left):
    """The number of the largest value of those left; `numbers` count up along the one axis."""
    most = tl.max(tl.where(is_left, values, float("-inf")), axis=0)
    none: tl.constexpr = 1 << 30
    return tl.min(tl.where(is_left & (values == most), numbers, none), axis=0)


@triton.jit
def _limit_groups(
    choice, is_left, num_groups, kept_groups, group_best,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Which groups are kept, by the sum of the best of [G, X]."""
    group, place = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    total = tl.zeros([GROUPS], tl.float32)
    for _ in range(group_best):
        most = tl.max(tl.where(is_left, choice, float("-inf")), axis=1)
        is_best = is_left & (choice == most[:, None])
        first = tl.min(tl.where(is_best, place[None, :], WIDTH), axis=1)
        total += tl.where(group < num_groups, most, 0.0)
        is_left = is_left & (place[None, :] != first[:, None])
    is_kept = tl.zeros([GROUPS], tl.int1)
    for _ in range(kept_groups):
        is_kept = is_kept | (group == _largest(total, group, (group < num_groups) & ~is_kept))
    return is_kept


@triton.jit
def _choose_kernel(
    logits, bias, given, weights, ids, num_parts, part_stride, stride, num_experts, num_groups,
    kept_groups, group_best, active, scale,
    SCORING: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GIVEN: tl.constexpr,
    IS_LIMITED: tl.constexpr, IS_NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group_experts = num_experts // num_groups
    group, place = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    wide_ids = group * group_experts + place
    inside = (group < num_groups) & (place < group_experts)
    wide = tl.zeros([GROUPS, WIDTH], tl.float32)
    places = logits + row * stride + wide_ids
    for _ in range(num_parts):
        wide += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        places += part_stride
    wide_scores = _score(wide, inside, SCORING)
    choice = wide_scores
    if HAS_BIAS:
        choice += tl.load(bias + wide_ids, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(choice == choice, choice, float("-inf"))
    if IS_LIMITED:
        is_kept = _limit_groups(choice, inside, num_groups, kept_groups, group_best, GROUPS, WIDTH)
        choice = tl.where(is_kept[:, None], choice, float("-inf"))
    SIZE: tl.constexpr = GROUPS * WIDTH
    scores, choice = tl.reshape(wide_scores, [SIZE]), tl.reshape(choice, [SIZE])
    numbers = tl.reshape(tl.broadcast_to(wide_ids, [GROUPS, WIDTH]), [SIZE])
    is_left = tl.reshape(tl.broadcast_to(inside, [GROUPS, WIDTH]), [SIZE])
    slot = tl.arange(0, ACTIVE)
    chosen_ids = tl.zeros([ACTIVE], tl.int32)
    chosen = tl.zeros([ACTIVE], tl.float32)
    for index in range(active):
        if IS_GIVEN:
            expert = tl.load(given + row * active + index).to(tl.int32)
        else:
            expert = _largest(choice, numbers, is_left)
            is_left = is_left & (numbers != expert)
        is_expert = (numbers == expert) & (scores == scores)
        score = tl.sum(tl.where(is_expert, scores, 0.0), axis=0)
        is_lost = tl.max(((numbers == expert) & (scores != scores)).to(tl.int32), axis=0) > 0
        chosen = tl.where(slot == index, tl.where(is_lost, float("nan"), score), chosen)
        chosen_ids = tl.where(slot == index, expert, chosen_ids)
    if IS_NORMALISED:
        chosen = chosen / (tl.sum(chosen, axis=0) + 1e-20)
    is_slot = slot < active
    tl.store(weights + row * active + slot, chosen * scale, mask=is_slot)
    tl.store(ids + row * active + slot, chosen_ids.to(tl.int64), mask=is_slot)


class Router:
    """`RouteOp`."""

    def __init__(self, *, is_exact: bool = False) -> None:
        """`is_exact`: a token's choice does not depend on how many others there are, if its dtype
        is bfloat16."""
        self._is_exact = is_exact

    def route(
        self,
        x_TM: torch.Tensor,
        weight_EM: torch.Tensor,
        bias_E: torch.Tensor | None,
        dims: RouterDims,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RouteOp`; logits of other dtypes than bfloat16 are a product of torch's."""
        if x_TM.dtype == torch.bfloat16 and weight_EM.dtype == torch.float32:
            parts_STE = router_logits(x_TM, weight_EM, is_exact=self._is_exact)
        else:
            parts_STE = F.linear(x_TM.float(), weight_EM.float())[None]
        return _launch(parts_STE, bias_E, None, _scoring(dims), dims)


def choose(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, dims: RouterDims
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights_TA float32, ids_TA int64) of `RouteOp`, from float32 logits; ids fall in their
    order of choice."""
    return _launch(logits_TE[None], bias_E, None, _scoring(dims), dims)


def _scoring(dims: RouterDims) -> tl.constexpr:
    return SIGMOID if dims.scoring is Scoring.SIGMOID else SOFTMAX


def route_scores(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    ids_TA: torch.Tensor | None,
    active: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `RouteScoresOp`."""
    if ids_TA is not None:
        active = ids_TA.shape[1]
    dims = RouterDims(active=active, normalise=True, scale=scale)
    weights_TA, chosen_TA = _launch(logits_TE[None], bias_E, ids_TA, ROOT, dims)
    return weights_TA, chosen_TA if ids_TA is None else ids_TA


def _launch(
    parts_STE: torch.Tensor,
    bias_E: torch.Tensor | None,
    given_TA: torch.Tensor | None,
    scoring: tl.constexpr,
    dims: RouterDims,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits are the sum of the parts."""
    num_parts, num_tokens, num_experts = parts_STE.shape
    assert num_experts % dims.groups == 0, f"{num_experts} experts in {dims.groups} groups"
    assert dims.active <= num_experts, f"{dims.active} of {num_experts} experts"
    weights_TA = parts_STE.new_empty(num_tokens, dims.active, dtype=torch.float32)
    ids_TA = parts_STE.new_empty(num_tokens, dims.active, dtype=torch.int64)
    if not num_tokens:
        return weights_TA, ids_TA
    if parts_STE.stride(2) != 1:
        parts_STE = parts_STE.contiguous()
    group_experts = num_experts // dims.groups
    _choose_kernel[(num_tokens,)](
        parts_STE, bias_E, None if given_TA is None else given_TA.contiguous(), weights_TA, ids_TA,
        num_parts, parts_STE.stride(0), parts_STE.stride(1), num_experts, dims.groups,
        dims.kept_groups, min(dims.group_best, group_experts), dims.active, float(dims.scale),
        SCORING=scoring, HAS_BIAS=bias_E is not None, IS_GIVEN=given_TA is not None,
        IS_LIMITED=dims.kept_groups < dims.groups, IS_NORMALISED=dims.normalise,
        GROUPS=triton.next_power_of_2(dims.groups), WIDTH=triton.next_power_of_2(group_experts),
        ACTIVE=triton.next_power_of_2(dims.active), num_warps=1,
    )  # fmt: skip
    return weights_TA, ids_TA


_INTS = (
    "num_parts", "part_stride", "stride", "num_experts", "num_groups", "kept_groups", "group_best",
    "active",
)  # fmt: skip


def _case(
    name: str, scoring: tl.constexpr, groups: int, width: int, *targets: int, **flags: bool
) -> AotCase:
    on = {"HAS_BIAS": False, "IS_GIVEN": False, "IS_LIMITED": False, "IS_NORMALISED": True} | flags
    return AotCase(
        name=f"route {name}",
        kernel=_choose_kernel,
        types={
            "logits": "*fp32", "bias": "*fp32", "given": "*i64", "weights": "*fp32", "ids": "*i64",
            "scale": "fp32",
        } | dict.fromkeys(_INTS, "i32"),
        constants=on | {"SCORING": scoring, "GROUPS": groups, "WIDTH": width, "ACTIVE": 8},
        aligned=("logits", "bias", "given", "weights", "ids", "stride"),
        num_warps=1,
        targets=targets or (90,),
    )  # fmt: skip


AOT_CASES = (
    _case("softmax 64", SOFTMAX, 1, 64, 80, 90, 100, IS_NORMALISED=False),
    _case("softmax 160 in 8 groups", SOFTMAX, 8, 32, IS_LIMITED=True, IS_NORMALISED=False),
    _case("sigmoid 256 in 8 groups", SIGMOID, 8, 32, 80, 90, 100, HAS_BIAS=True, IS_LIMITED=True),
    _case("sigmoid 384", SIGMOID, 1, 512, HAS_BIAS=True),
    _case("sqrt softplus 256", ROOT, 1, 256, HAS_BIAS=True),
    _case("sqrt softplus by table 256", ROOT, 1, 256, IS_GIVEN=True),
)
