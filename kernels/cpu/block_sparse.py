"""MiniMax-M3's ops, many rows at once. Shapes: see `batchmla.kernels.block_sparse_ops`.

Rows go in blocks whose scores and gathered keys stay within a few MiB. R rows of a block, G
sequences of its keys (R of them, or one), L keys, B of all keys in blocks; X a row and a kv head.
Only products round a value by its neighbours, so exact mode puts in its own and shares the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from batchmla.kernels.block_sparse_ops import BlockDims, BlockSparseOps, OaiGate
from batchmla.kernels.cpu.experts import ExpertLinear, expert_by_expert
from batchmla.kernels.cpu.linear import one_linear
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.cpu.sdpa import sdpa
from batchmla.kernels.cpu.sparse import choose
from batchmla.kernels.ops import Packed
from batchmla.kernels.sparse_ops import IndexGroup

BLOCK_VALUES = 2**21  # scores, or gathered elements, of a block of rows

Dots = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(q_RKD, k_GLD), float32 → q · k [R, K, L]."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(q_XHD, k_XLD, v_XLD, bias_XL, scale) → softmax(scale · q kᵀ + bias) v, [X, H, D]."""


def index_dots(q_RKD: torch.Tensor, k_GLD: torch.Tensor) -> torch.Tensor:
    """One product, or one for each row."""
    num_rows, num_heads, width = q_RKD.shape
    if len(k_GLD) == 1:
        return (q_RKD.reshape(-1, width) @ k_GLD[0].T).view(num_rows, num_heads, -1)
    return torch.bmm(q_RKD, k_GLD.transpose(1, 2))


def attend_heads(
    q_XHD: torch.Tensor,
    k_XLD: torch.Tensor,
    v_XLD: torch.Tensor,
    bias_XL: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The query heads of one kv head as its queries."""
    k_XL1D, v_XL1D = k_XLD[:, :, None], v_XLD[:, :, None]
    return sdpa(q_XHD[:, None], k_XL1D, v_XL1D, bias_XL[:, None], scale)[0][:, 0]


def choose_blocks(dots_RKL: torch.Tensor, visible_R: torch.Tensor, dims: BlockDims) -> torch.Tensor:
    """[R, K, U], rising. Changes the dots in place."""
    num_rows, num_heads, num_keys = dots_RKL.shape
    is_beyond_RL = torch.arange(num_keys, device=dots_RKL.device) >= visible_R[:, None]
    dots_RKL.masked_fill_(is_beyond_RL[:, None], -torch.inf)
    dots_RKB = F.pad(dots_RKL, (0, -num_keys % dims.block_tokens), value=-torch.inf)
    scores_RKB = dots_RKB.view(num_rows, num_heads, -1, dims.block_tokens).amax(dim=3)
    scores_RKB.clamp_(max=torch.finfo(torch.float32).max)  # what is forced stands above
    ends_R = -(-visible_R // dims.block_tokens)
    block_B = torch.arange(scores_RKB.shape[2], device=dots_RKL.device)
    is_forced_RB = (block_B >= ends_R[:, None] - dims.forced) & (block_B < ends_R[:, None])
    scores_RKB.masked_fill_(is_forced_RB[:, None], torch.inf)
    chosen_XU = choose(scores_RKB.flatten(0, 1), ends_R.repeat_interleave(num_heads), dims.count)
    return chosen_XU.view(num_rows, num_heads, -1)


def act_mul(gate_up_TF: torch.Tensor, gate: OaiGate) -> torch.Tensor:
    """In float32, rounded once; the sigmoid is written out, as torch rounds its own differently at
    the end of a run of values."""
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    gate_TF = gate_TF.clamp(max=gate.limit)
    sigmoid_TF = (gate_TF * -gate.alpha).exp_().add_(1).reciprocal_()
    hidden_TF = sigmoid_TF.mul_(gate_TF).mul_(up_TF.clamp(-gate.limit, gate.limit).add_(1))
    return hidden_TF.to(gate_up_TF.dtype)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a group: where they stand among all, their pages, the keys they see."""

    place: slice
    pages_GP: torch.Tensor
    visible_R: torch.Tensor
    num_keys: int


def _blocks_of_rows(
    groups: Sequence[IndexGroup], values: Callable[[IndexGroup], int]
) -> Iterator[_Rows]:
    """Blocks with at most BLOCK_VALUES in them; `values` says how many a row of a group has."""
    for group in groups:
        size = max(1, BLOCK_VALUES // values(group))
        for first in range(0, group.num_rows, size):
            inside = slice(first, min(first + size, group.num_rows))
            pages_GP = group.pages_GP if len(group.pages_GP) == 1 else group.pages_GP[inside]
            place = slice(group.first_row + inside.start, group.first_row + inside.stop)
            yield _Rows(place, pages_GP, group.visible_N[inside], group.num_keys)


class BlockSparse:
    """These ops of one back end; gathered rows share one scratch."""

    def __init__(
        self,
        scratch: Scratch,
        expert_linear: ExpertLinear = one_linear,
        dots: Dots = index_dots,
        attend: Attend = attend_heads,
    ) -> None:
        self._scratch = scratch
        self._expert_linear = expert_linear
        self._dots = dots
        self._attend = attend

    def select(
        self,
        q_NKD: torch.Tensor,
        key_PBD: torch.Tensor,
        groups: Sequence[IndexGroup],
        dims: BlockDims,
    ) -> torch.Tensor:
        """Block by block of rows: dots, scores of blocks, the choice."""
        num_heads, width = q_NKD.shape[1:]

        def values(group: IndexGroup) -> int:
            is_shared = len(group.pages_GP) == 1
            return (num_heads if is_shared else num_heads + width) * group.num_keys

        parts = []
        for rows in _blocks_of_rows(groups, values):
            k_GLD = self._index_keys(key_PBD, rows.pages_GP)[:, : rows.num_keys]
            dots_RKL = self._dots(q_NKD[rows.place].float(), k_GLD)
            parts.append(choose_blocks(dots_RKL, rows.visible_R, dims))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _index_keys(self, key_PBD: torch.Tensor, pages_GP: torch.Tensor) -> torch.Tensor:
        """All keys of the pages, float32 [G, P*B, D]."""
        shape = (pages_GP.numel(), *key_PBD.shape[1:])
        pages = self._scratch.take("index keys", shape, key_PBD)
        torch.index_select(key_PBD, 0, pages_GP.flatten(), out=pages)
        return pages.view(len(pages_GP), -1, key_PBD.shape[2]).float()

    def attend(
        self,
        q_NHD: torch.Tensor,
        key_PBW: torch.Tensor,
        value_PBW: torch.Tensor,
        groups: Sequence[IndexGroup],
        blocks_NKU: torch.Tensor,
        dims: BlockDims,
        scale: float,
    ) -> torch.Tensor:
        """The keys of a row's blocks, gathered head by head; those it does not see are masked, and
        its last one stands in for them."""
        head_dim, kv_heads, page_tokens = q_NHD.shape[2], blocks_NKU.shape[1], key_PBW.shape[1]
        head_K1 = torch.arange(kv_heads, device=q_NHD.device)[:, None]
        offset_T = torch.arange(dims.block_tokens, device=q_NHD.device)
        row_values = dims.num_keys * kv_heads * head_dim
        parts = []
        for rows in _blocks_of_rows(groups, lambda _: row_values):
            blocks_RKU = blocks_NKU[rows.place]
            at_RKL = (blocks_RKU[..., None] * dims.block_tokens + offset_T).flatten(2)
            visible_R11 = rows.visible_R[:, None, None]
            bias_RKL = q_NHD.new_zeros(at_RKL.shape).masked_fill_(at_RKL >= visible_R11, -torch.inf)
            at_RKL = torch.minimum(at_RKL, visible_R11 - 1)
            pages_RP = rows.pages_GP.expand(len(at_RKL), -1)
            page_RX = pages_RP.gather(1, (at_RKL // page_tokens).flatten(1))
            slots_RKL = page_RX.view_as(at_RKL) * page_tokens + at_RKL % page_tokens
            places_X = (slots_RKL * kv_heads + head_K1).flatten()
            k_XLD, v_XLD = (
                self._heads(use, cache, places_X, q_NHD).view(-1, dims.num_keys, head_dim)
                for use, cache in (("block keys", key_PBW), ("block values", value_PBW))
            )
            q_XHD = q_NHD[rows.place].reshape(len(k_XLD), -1, head_dim)
            out_XHD = self._attend(q_XHD, k_XLD, v_XLD, bias_RKL.flatten(0, 1), scale)
            parts.append(out_XHD.reshape(len(at_RKL), -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _heads(
        self, use: str, cache_PBW: torch.Tensor, places_X: torch.Tensor, like_NHD: torch.Tensor
    ) -> torch.Tensor:
        """Rows of single kv heads, [X, D]."""
        head_dim = like_NHD.shape[2]
        rows_XD = self._scratch.take(use, (len(places_X), head_dim), cache_PBW)
        torch.index_select(cache_PBW.view(-1, head_dim), 0, places_X, out=rows_XD)
        return rows_XD.to(like_NHD.dtype)

    def experts(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
        gate: OaiGate,
    ) -> torch.Tensor:
        """Expert by expert over its tokens."""
        act = partial(act_mul, gate=gate)
        return expert_by_expert(x_TM, weights_TA, ids_TA, up, down, self._expert_linear, act)


def make_block_sparse(ops: BlockSparse) -> BlockSparseOps:
    """These ops as one value."""
    return BlockSparseOps(
        select=ops.select, attend=ops.attend, act_mul=act_mul, experts=ops.experts
    )
