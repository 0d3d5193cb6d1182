"""The gated delta rule, token by token. Shapes: see `batchmla.kernels.kda_ops`.

The columns of a state follow the same rule apart from each other, so a program takes some columns
of one head of one sequence: it holds them in registers from the first token to the last. A token's
numbers depend on its sequence alone, and not on where a chunk of it was cut. The new state's result
is Sᵀ(keep · q) + u (k · q) of the old one, so that both sums over the keys are taken at once.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from batchmla.kernels.kda_ops import LaneRows
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.spans import put

COLUMNS = 8  # a sector of memory; more would leave a long sequence to few programs
WARPS = 1
STAGES = 4  # tokens whose inputs are on their way
LENGTH_EPS = 1e-6


@triton.jit
def _delta_kernel(
    q, k, v, decay, beta, state, plan, out, q_token, q_head, k_token, k_head, v_token, v_head,
    lane_stride, num_heads, width, num_parts, length_eps,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    entry = plan + tl.program_id(1) * 4
    start, end, lane = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if start >= end:
        return
    keys, columns = tl.arange(0, KEYS), part * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = keys < width, columns < width
    inside = is_key[:, None] & is_column[None, :]
    cells = keys[:, None] * width + columns[None, :]
    kept = state + lane * lane_stride + head * width * width + cells
    held = tl.load(kept, mask=inside & (tl.load(entry + 3) == 0), other=0.0)
    root = tl.rsqrt(width.to(tl.float32))
    for row in tl.range(start, end, num_stages=STAGES):
        at = (row * num_heads + head) * width
        keep = tl.exp(tl.load(decay + at + keys, mask=is_key, other=0.0))
        key = tl.load(k + row * k_token + head * k_head + keys, mask=is_key, other=0.0)
        query = tl.load(q + row * q_token + head * q_head + keys, mask=is_key, other=0.0)
        value = tl.load(v + row * v_token + head * v_head + columns, mask=is_column, other=0.0)
        strength = tl.load(beta + row * num_heads + head)
        key, query = key.to(tl.float32), query.to(tl.float32)
        key = key * tl.rsqrt(tl.sum(key * key, axis=0) + length_eps)
        query = query * (tl.rsqrt(tl.sum(query * query, axis=0) + length_eps) * root)
        held = held * keep[:, None]
        found = tl.sum(held * key[:, None], axis=0)
        result = tl.sum(held * query[:, None], axis=0)
        change = strength * (value.to(tl.float32) - found)
        held += key[:, None] * change[None, :]
        result += change * tl.sum(key * query, axis=0)
        tl.store(out + at + columns, result, mask=is_column)
    tl.store(kept, held, mask=inside)


def delta(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    decay_THD: torch.Tensor,
    beta_TH: torch.Tensor,
    state_LHX: torch.Tensor,
    rows: LaneRows,
) -> torch.Tensor:
    """See `DeltaOp`. The plan of a step is sent to the device once for all layers."""
    num_tokens, num_heads, width = q_THD.shape
    assert state_LHX.shape[1:] == (num_heads, width * width), (state_LHX.shape, q_THD.shape)
    assert state_LHX.dtype == torch.float32 and state_LHX[0].is_contiguous(), state_LHX.stride()
    out_THD = torch.empty(num_tokens, num_heads, width, device=q_THD.device)
    if not num_tokens:
        return out_THD
    plan_S4: torch.Tensor = rows.kept.get(
        ("delta", q_THD.device), lambda: put(_plan(rows), q_THD.device)
    )
    q_THD, k_THD, v_THD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THD, k_THD, v_THD))
    keys = triton.next_power_of_2(width)
    columns = min(keys, COLUMNS)
    num_parts = triton.cdiv(width, columns)
    _delta_kernel[(num_heads * num_parts, len(plan_S4))](
        q_THD, k_THD, v_THD, decay_THD.contiguous(), beta_TH.contiguous(), state_LHX,
        plan_S4, out_THD, *q_THD.stride()[:2], *k_THD.stride()[:2], *v_THD.stride()[:2],
        state_LHX.stride(0), num_heads, width, num_parts, LENGTH_EPS,
        KEYS=keys, COLUMNS=columns, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out_THD


def _plan(rows: LaneRows) -> torch.Tensor:
    """[S, 4] int64: first row, row behind the last, lane, whether it begins; of the sequences with
    rows, the longest first."""
    counts_S = np.diff(rows.starts_S1)
    order = np.argsort(-counts_S, kind="stable")[: int((counts_S > 0).sum())]
    columns = (rows.starts_S1[:-1], rows.starts_S1[1:], rows.lanes_S, rows.is_first_S)
    return torch.from_numpy(np.stack([x[order].astype(np.int64) for x in columns], axis=1))


_INTS = (
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "lane_stride", "num_heads",
    "width", "num_parts",
)  # fmt: skip
AOT_CASES = (
    AotCase(
        name="delta rule 128",
        kernel=_delta_kernel,
        types={
            "q": "*bf16", "k": "*bf16", "v": "*bf16", "decay": "*fp32", "beta": "*fp32",
            "state": "*fp32", "plan": "*i64", "out": "*fp32", **dict.fromkeys(_INTS, "i32"),
            "length_eps": "fp32",
        },
        constants={"KEYS": 128, "COLUMNS": COLUMNS, "STAGES": STAGES},
        aligned=(
            "q", "k", "v", "decay", "beta", "state", "plan", "out", *_INTS[:7], "num_heads",
            "width",
        ),
        num_warps=WARPS,
        requires=("LDGSTS",),
    ),
)  # fmt: skip
