"""Experts over sorted tokens. Shapes: see `batchmla.kernels.ops`; X choices (T*A), N padded rows.

oneDNN builds a kernel for every row count it has not met, which costs more than the product: the
rows of an expert are padded to one of a few counts.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.linear import act_mul, one_linear
from batchmla.kernels.ops import Packed

MAX_ROWS_AT_ONCE = 256  # beyond, the products of experts that were not chosen cost more than a loop
FEW_ROWS = 32  # rows an expert up to which the weights' bytes dominate and calls are saved

Counts = npt.NDArray[np.int64]
ExpertLinear = Callable[[torch.Tensor, Packed, int], torch.Tensor]
"""(x_NI, weight, expert) → [N, O]."""
Activation = Callable[[torch.Tensor], torch.Tensor]
"""[N, 2*F] → [N, F]."""


def experts(
    x_TM: torch.Tensor,
    weights_TA: torch.Tensor,
    ids_TA: torch.Tensor,
    up: Packed,
    down: Packed,
) -> torch.Tensor:
    """Small experts all at once for up to 256 rows, else each over the tokens it received."""
    num_experts = up.shape[0]
    if up.quantised is not None or down.quantised is not None:
        return expert_by_expert(x_TM, weights_TA, ids_TA, up, down, one_linear, act_mul)
    if not up.laid_out:
        return _grouped(x_TM, weights_TA, ids_TA, up, down)
    if len(up.laid_out) > num_experts and x_TM.shape[0] <= MAX_ROWS_AT_ONCE:
        return _at_once(x_TM, weights_TA, ids_TA, up, down)
    return _one_by_one(x_TM, weights_TA, ids_TA, up, down)


def padded_rows(counts_E: Counts) -> Counts:
    """The next of the row counts 0, 8, 16, 32, 48, 64, 96 … 256, 320 … 1024, 1280 …"""
    bounds = np.array([16, 64, 256, 1024])
    steps = np.array([8, 16, 32, 64, 256])
    step_E = steps[np.searchsorted(bounds, counts_E)]
    padded_E: Counts = -(-counts_E // step_E) * step_E
    return padded_E


def _one_by_one(
    x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor, up: Packed, down: Packed
) -> torch.Tensor:
    """A loop over the experts that received tokens; one weighted sum of their rows at the end."""
    num_experts, num_active = up.shape[0], ids_TA.shape[1]
    ids_X = ids_TA.flatten().numpy()
    order_X = np.argsort(ids_X.astype(np.uint16), kind="stable")  # 16 bits are sorted by radix
    counts_E = np.bincount(ids_X, minlength=num_experts)
    sizes_E = padded_rows(counts_E)
    shift_E = (np.cumsum(sizes_E) - sizes_E) - (np.cumsum(counts_E) - counts_E)
    place_X = np.arange(len(ids_X)) + np.repeat(shift_E, counts_E)
    token_N = np.zeros(int(sizes_E.sum()), np.int64)  # padding repeats token 0 and is not read
    token_N[place_X] = order_X // num_active
    row_X = np.empty_like(place_X)
    row_X[order_X] = place_X

    rows_NM = x_TM.index_select(0, torch.from_numpy(token_N))
    chosen = [(expert, size) for expert, size in enumerate(sizes_E.tolist()) if size]
    borders = np.cumsum([n for _, n in chosen])[:-1].tolist()
    parts = list(zip((e for e, _ in chosen), torch.tensor_split(rows_NM, borders), strict=True))
    if len(token_N) <= FEW_ROWS * len(chosen):
        hidden_NF = act_mul(torch.cat([one_linear(x, up, expert) for expert, x in parts]))
        hidden = torch.tensor_split(hidden_NF, borders)
        out = [one_linear(h, down, expert) for (expert, _), h in zip(parts, hidden, strict=True)]
    else:
        out = [one_linear(act_mul(one_linear(x, up, expert)), down, expert) for expert, x in parts]
    return F.embedding_bag(
        torch.from_numpy(row_X).view(ids_TA.shape),
        torch.cat(out),
        mode="sum",
        per_sample_weights=weights_TA.to(x_TM.dtype),
    )


def _at_once(
    x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor, up: Packed, down: Packed
) -> torch.Tensor:
    """One MLP of E*F features; those of experts that were not chosen are weighted by 0."""
    num_experts, num_tokens = up.shape[0], x_TM.shape[0]
    hidden_TX = act_mul(one_linear(x_TM, up, num_experts))
    weights_TE = torch.zeros(num_tokens, num_experts, dtype=weights_TA.dtype, device=x_TM.device)
    weights_TE.scatter_(1, ids_TA, weights_TA)
    hidden_TEF = hidden_TX.view(num_tokens, num_experts, -1)
    hidden_TEF.mul_(weights_TE.to(x_TM.dtype)[:, :, None])
    return one_linear(hidden_TX, down, num_experts)


def _grouped(
    x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor, up: Packed, down: Packed
) -> torch.Tensor:
    """torch's grouped product over plain weights."""
    assert up.plain is not None and down.plain is not None
    flat_X, order_X = ids_TA.flatten().sort()
    token_X = order_X // ids_TA.shape[1]
    ends_E = torch.searchsorted(
        flat_X, torch.arange(up.shape[0], device=flat_X.device), right=True, out_int32=True
    )
    sorted_XM = x_TM.index_select(0, token_X)
    hidden_XF = act_mul(F.grouped_mm(sorted_XM, up.plain.transpose(1, 2), offs=ends_E))
    out_XM = F.grouped_mm(hidden_XF, down.plain.transpose(1, 2), offs=ends_E)
    out_XM = out_XM.float().mul_(weights_TA.flatten()[order_X, None])
    out_TM = torch.zeros(x_TM.shape, dtype=torch.float32, device=x_TM.device)
    return out_TM.index_add_(0, token_X, out_XM).to(x_TM.dtype)


def expert_by_expert(
    x_TM: torch.Tensor,
    weights_TA: torch.Tensor,
    ids_TA: torch.Tensor,
    up: Packed,
    down: Packed,
    linear: ExpertLinear,
    act: Activation,
) -> torch.Tensor:
    """Each over the tokens it received, unpadded; a token's experts are summed as it chose them,
    so that its result depends on that token alone if those of `linear` and `act` do."""
    ids_X = ids_TA.flatten().cpu().numpy()
    order_X = np.argsort(ids_X.astype(np.uint16), kind="stable")
    received_E = np.bincount(ids_X, minlength=up.shape[0]).tolist()
    tokens_X = torch.from_numpy(order_X // ids_TA.shape[1]).to(x_TM.device)
    rows_XM, hidden, start = x_TM.index_select(0, tokens_X), [], 0
    for expert, count in enumerate(received_E):
        if count:
            hidden.append(linear(rows_XM[start : start + count], up, expert))
            start += count
    hidden_XF, out, start = act(torch.cat(hidden)), [], 0
    for expert, count in enumerate(received_E):
        if count:
            out.append(linear(hidden_XF[start : start + count], down, expert))
            start += count
    place_X = np.empty_like(order_X)
    place_X[order_X] = np.arange(len(order_X))
    return F.embedding_bag(
        torch.from_numpy(place_X).to(x_TM.device).view(ids_TA.shape),
        torch.cat(out),
        mode="sum",
        per_sample_weights=weights_TA.to(x_TM.dtype),
    )
