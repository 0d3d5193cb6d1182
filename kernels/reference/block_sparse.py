"""MiniMax-M3's ops, row by row. Shapes: see `batchmla.kernels.block_sparse_ops`."""

import math
from collections.abc import Iterator, Sequence

import torch

from batchmla.kernels.block_sparse_ops import BlockDims, BlockSparseOps, OaiGate
from batchmla.kernels.ops import Packed
from batchmla.kernels.reference.linear import plain
from batchmla.kernels.sparse_ops import IndexGroup

Rank = tuple[bool, float, int]
"""Whether a block is not forced, its score turned round, its number."""


def _rows(groups: Sequence[IndexGroup], page_tokens: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Each row and the flat cache rows of the keys it sees."""
    for group in groups:
        for index in range(group.num_rows):
            pages_P = group.pages_GP[index if len(group.pages_GP) > 1 else 0].tolist()
            slots = [
                pages_P[at // page_tokens] * page_tokens + at % page_tokens
                for at in range(int(group.visible_N[index]))
            ]
            yield group.first_row + index, torch.tensor(slots)


def select(
    q_NKD: torch.Tensor, key_PBD: torch.Tensor, groups: Sequence[IndexGroup], dims: BlockDims
) -> torch.Tensor:
    """Every block of every head by its score, then the first of them."""
    blocks_NKU = torch.empty(*q_NKD.shape[:2], dims.count, dtype=torch.int64)
    for row, slots_L in _rows(groups, key_PBD.shape[1]):
        k_LD = key_PBD.flatten(0, 1)[slots_L].float()
        num_blocks = math.ceil(len(slots_L) / dims.block_tokens)
        for head, q_D in enumerate(q_NKD[row].float()):
            dots = (k_LD @ q_D).tolist()

            def rank(block: int, dots: list[float] = dots, num_blocks: int = num_blocks) -> Rank:
                inside = dots[block * dims.block_tokens : (block + 1) * dims.block_tokens]
                best = -math.inf if any(map(math.isnan, inside)) else max(inside)
                return block < num_blocks - dims.forced, -best, block

            chosen = sorted(range(num_blocks), key=rank)[: dims.count]
            blocks_NKU[row, head] = torch.tensor(sorted(chosen))
    return blocks_NKU


def attend(
    q_NHD: torch.Tensor,
    key_PBW: torch.Tensor,
    value_PBW: torch.Tensor,
    groups: Sequence[IndexGroup],
    blocks_NKU: torch.Tensor,
    dims: BlockDims,
    scale: float,
) -> torch.Tensor:
    """Head by head over the keys of its blocks."""
    num_heads, head_dim = q_NHD.shape[1:]
    share = num_heads // blocks_NKU.shape[1]
    out_NHD = torch.empty_like(q_NHD)
    for row, slots_L in _rows(groups, key_PBW.shape[1]):
        block_L = torch.arange(len(slots_L)) // dims.block_tokens
        for head in range(num_heads):
            read_X = slots_L[torch.isin(block_L, blocks_NKU[row, head // share])]
            columns = slice(head // share * head_dim, (head // share + 1) * head_dim)
            k_XD, v_XD = (
                cache.flatten(0, 1)[read_X, columns].float() for cache in (key_PBW, value_PBW)
            )
            scores_X = k_XD @ q_NHD[row, head].float() * scale
            weights_X = torch.exp(scores_X - scores_X.max())
            out_NHD[row, head] = (weights_X / weights_X.sum() @ v_XD).to(q_NHD.dtype)
    return out_NHD.flatten(1)


def act_mul(gate_up_TF: torch.Tensor, gate: OaiGate) -> torch.Tensor:
    """sigmoid(z) = 1 / (1 + exp(-z))."""
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=gate.limit), up_TF.clamp(-gate.limit, gate.limit)
    hidden_TF = gate_TF / (1 + torch.exp(-gate.alpha * gate_TF)) * (up_TF + 1)
    return hidden_TF.to(gate_up_TF.dtype)


def experts(
    x_TM: torch.Tensor,
    weights_TA: torch.Tensor,
    ids_TA: torch.Tensor,
    up: Packed,
    down: Packed,
    gate: OaiGate,
) -> torch.Tensor:
    """Token by token."""
    up_EFM, down_EMF = plain(up).float(), plain(down).float()
    out_TM = torch.zeros(x_TM.shape, dtype=torch.float32)
    for token, (weights_A, ids_A) in enumerate(zip(weights_TA, ids_TA.tolist(), strict=True)):
        for weight, expert in zip(weights_A, ids_A, strict=True):
            hidden_F = act_mul(up_EFM[expert] @ x_TM[token].float(), gate)
            out_TM[token] += weight * (down_EMF[expert] @ hidden_F)
    return out_TM.to(x_TM.dtype)


def make_block_sparse() -> BlockSparseOps:
    """The specification of these ops."""
    return BlockSparseOps(select=select, attend=attend, act_mul=act_mul, experts=experts)
