"""DeepSeek Sparse Attention on a GPU: scores and an exact choice of keys, attention over them.

Rows go in blocks whose scores stay within `SCORE_BYTES`. Shapes: see `batchmla.kernels.sparse_ops`.
"""

from collections.abc import Sequence

import torch

from batchmla.kernels.ops import MlaDims, Packed
from batchmla.kernels.sparse_ops import IndexGroup, Record
from batchmla.kernels.triton.index_scores import IndexKeys, index_scores
from batchmla.kernels.triton.sparse_mla import LatentRows, attend_slots
from batchmla.kernels.triton.topk import choose

SCORE_BYTES = 2**28
ALIGNED = 64  # scores of a row begin at multiples of it


def select_keys(
    q_NID: torch.Tensor,
    weights_NI: torch.Tensor,
    key_PBD: torch.Tensor,
    groups: Sequence[IndexGroup],
    count: int,
    record: Record | None,
) -> torch.Tensor:
    """See `SelectKeysOp`."""
    device, page_tokens = q_NID.device, key_PBD.shape[1]
    keys, q_NID, weights_NI = IndexKeys.of(key_PBD, record), q_NID.contiguous(), weights_NI.float()
    weights_NI = weights_NI.contiguous()
    slots_NK = torch.empty(len(q_NID), count, dtype=torch.int64, device=device)
    for group in groups:
        for inside, rows in blocks_of_rows(group, group.num_keys):
            visible_R, pages_GP = group.visible_N[inside], group_pages(group, inside)
            scores_RL = make_scores(inside.stop - inside.start, group.num_keys, device)
            index_scores(q_NID[rows], weights_NI[rows], keys, pages_GP, visible_R, scores_RL)
            choose(scores_RL, visible_R, slots_NK[rows], pages_GP=pages_GP, page_tokens=page_tokens)
    return slots_NK


def sparse_mla(
    q_NHD: torch.Tensor,
    cache_PBX: torch.Tensor,
    slots_NK: torch.Tensor,
    kv_b: Packed,
    dims: MlaDims,
    record: Record | None,
) -> torch.Tensor:
    """See `SparseMlaOp`; the products with kv_b are torch's."""
    assert kv_b.plain is not None, "a latent weight without its plain form"
    up_HXC = kv_b.plain.view(dims.heads, dims.nope + dims.value, dims.latent)
    q_HNC = torch.bmm(q_NHD[..., : dims.nope].transpose(0, 1), up_HXC[:, : dims.nope])
    z_HNC = attend_slots(
        q_HNC.transpose(0, 1), q_NHD[..., dims.nope :], LatentRows.of(cache_PBX, record),
        slots_NK.contiguous(), dims.scale,
    )  # fmt: skip
    out_HNW = torch.bmm(z_HNC, up_HXC[:, dims.nope :].transpose(1, 2))
    return out_HNW.transpose(0, 1).flatten(1)


def blocks_of_rows(group: IndexGroup, row_scores: int) -> list[tuple[slice, slice]]:
    """Blocks of a group's rows whose scores fit, within the group and among all rows."""
    block = max(1, SCORE_BYTES // (4 * (row_scores + ALIGNED)))
    found = []
    for first in range(0, group.num_rows, block):
        end = min(first + block, group.num_rows)
        rows = slice(group.first_row + first, group.first_row + end)
        found.append((slice(first, end), rows))
    return found


def group_pages(group: IndexGroup, inside: slice) -> torch.Tensor:
    """Pages of some rows of a group, or the ones of all."""
    return group.pages_GP if len(group.pages_GP) == 1 else group.pages_GP[inside]


def make_scores(num_rows: int, length: int, device: torch.device) -> torch.Tensor:
    """[num_rows, length] float32, rows aligned, unwritten."""
    whole = -(-length // ALIGNED) * ALIGNED
    return torch.empty(num_rows, whole, dtype=torch.float32, device=device)[:, :length]
