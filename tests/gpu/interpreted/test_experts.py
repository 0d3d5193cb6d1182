"""Whole experts in the interpreter: values, foreign ids, and what a token's result depends on."""

from collections.abc import Callable

import pytest
import torch
from expert_case import hidden_values, in_order, quantised, row_values
from triton_case import BOUNDS, error

from batchmla.kernels.block_sparse_ops import OaiGate
from batchmla.kernels.ops import Packed, PackKind
from batchmla.kernels.quant import Coding
from batchmla.kernels.reference import block_sparse, hybrid, moe
from batchmla.kernels.triton.experts import Experts, combine

BF16 = torch.bfloat16
NUM_EXPERTS, WIDTH, FFN = 4, 64, 48
LIMIT = 0.7
GATE = OaiGate(alpha=1.702, limit=0.7)
Run = Callable[..., torch.Tensor]
OPS: dict[str, tuple[Callable[[Experts], Run], Run, tuple[object, ...]]] = {
    "silu": (lambda ops: ops.experts, moe.experts, ()),
    "clamped": (lambda ops: ops.clamped_experts, hybrid.clamped_experts, (LIMIT,)),
    "oai": (lambda ops: ops.oai_experts, block_sparse.experts, (GATE,)),
}


def weights(dtype: torch.dtype) -> tuple[Packed, Packed]:
    up = (torch.randn(NUM_EXPERTS, 2 * FFN, WIDTH) / WIDTH**0.5).to(dtype)
    down = (torch.randn(NUM_EXPERTS, WIDTH, FFN) / FFN**0.5).to(dtype)
    return (
        Packed(PackKind.EXPERTS_UP, tuple(up.shape), plain=up),
        Packed(PackKind.EXPERTS_DOWN, tuple(down.shape), plain=down),
    )


def tokens(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(count)])
    return torch.randn(count, WIDTH).to(dtype), torch.rand(count, 2), ids


@pytest.mark.parametrize("name", OPS)
def test_values(name: str) -> None:
    own, reference, more = OPS[name]
    x, scores, ids = tokens(9, torch.float32)
    up, down = weights(torch.float32)
    found = own(Experts())(x, scores, ids, up, down, *more)
    assert error(found, reference(x, scores, ids, up, down, *more)) <= BOUNDS[torch.float32]


def test_rounded_where_it_says() -> None:
    """bfloat16: hidden values, an expert's row, and the sum are each rounded once."""
    x, scores, ids = tokens(9, BF16)
    up, down = weights(BF16)
    found = Experts().experts(x, scores, ids, up, down)
    assert up.plain is not None and down.plain is not None
    wanted = torch.zeros(9, WIDTH, dtype=torch.float64)
    for token in range(9):
        for score, expert in zip(scores[token], ids[token], strict=True):
            gate, each = (up.plain[expert].double() @ x[token].double()).chunk(2)
            hidden = (gate * torch.sigmoid(gate) * each).bfloat16()
            row = (down.plain[expert].double() @ hidden.double()).bfloat16()
            wanted[token] += score.double() * row.double()
    assert error(found, wanted) <= BOUNDS[BF16]


def test_choices_of_no_expert_here_add_nothing() -> None:
    x, scores, ids = tokens(6, BF16)
    up, down = weights(BF16)
    ids[1] = torch.tensor([-1, NUM_EXPERTS])
    ids[4, 0] = -5
    scores[4, 0] = float("nan")
    found = Experts().experts(x, scores, ids, up, down)
    one = Experts().experts(x[4:5], scores[4:5, 1:], ids[4:5, 1:], up, down)
    assert not found[1].any() and torch.equal(found[4:5], one)


@pytest.mark.parametrize("count", [3, 40])
def test_exact_is_the_same_alone_and_among_others(count: int) -> None:
    x, scores, ids = tokens(count, BF16)
    up, down = weights(BF16)
    ops = Experts(is_exact=True)
    among = ops.experts(x, scores, ids, up, down)
    for token in (0, count - 1):
        some = slice(token, token + 1)
        assert torch.equal(among[some], ops.experts(x[some], scores[some], ids[some], up, down))


def test_a_token_that_is_no_number_harms_itself_only() -> None:
    x, scores, ids = tokens(8, BF16)
    up, down = weights(BF16)
    before = Experts().experts(x, scores, ids, up, down)
    x[3] = float("nan")
    after = Experts().experts(x, scores, ids, up, down)
    others = [token for token in range(8) if token != 3]
    assert torch.equal(before[others], after[others]) and after[3].isnan().all()


FORMS = {
    "e4m3": (Coding.E4M3, 128, torch.float32, 128),
    "e2m1": (Coding.E2M1, 32, torch.uint8, None),
    "int4": (Coding.INT4, 32, BF16, None),
    "e4m3 in small blocks": (Coding.E4M3, 32, torch.float32, 48),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_weight_is_served(form: str) -> None:
    coding, block, scales, rows = FORMS[form]
    up = quantised((3, 256, 128), coding, block, scale_dtype=scales, row_block=rows)
    down = quantised((3, 128, 128), coding, block, scale_dtype=scales, row_block=rows)
    x, scores, ids = torch.randn(4, 128).to(BF16), torch.rand(4, 2), torch.randint(-1, 3, (4, 2))
    found = Experts().experts(x, scores, ids, *(
        Packed(kind, each.shape, quantised=each)
        for kind, each in ((PackKind.EXPERTS_UP, up), (PackKind.EXPERTS_DOWN, down))
    ))  # fmt: skip
    hidden = hidden_values(x, up.expanded(BF16), ids).to(BF16)
    values = row_values(hidden, down.expanded(BF16), ids).to(BF16)
    rows_X = torch.zeros(8, 128, dtype=torch.float64)
    rows_X[sorted(in_order(ids, 3))] = values.double()
    wanted = (scores.double()[:, :, None] * rows_X.view(4, 2, 128)).sum(1)
    assert error(found, wanted) <= (5e-2 if form == "e4m3" else BOUNDS[BF16])


def test_no_tokens() -> None:
    up, down = weights(BF16)
    empty = torch.empty(0, 2)
    out = Experts().experts(torch.empty(0, WIDTH, dtype=BF16), empty, empty.long(), up, down)
    assert out.shape == (0, WIDTH)


def test_combine_reads_no_row_that_was_not_written() -> None:
    rows = torch.randn(4, 1030)
    rows[1] = float("nan")
    ids, scores = torch.tensor([[0, -1], [2, 2]]), torch.rand(2, 2)
    wanted = torch.stack(
        (scores[0, 0] * rows[0], scores[1, 0] * rows[2] + scores[1, 1] * rows[3])
    ).double()
    assert error(combine(rows, scores, ids, 3), wanted) <= BOUNDS[torch.float32]
