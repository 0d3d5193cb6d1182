"""Experts that ranks share: each token's choices go to the ranks that hold them, and come back as
one sum.

T tokens of this rank's attention group, G groups, R rows that came from all groups, M width, E
experts of this rank, A active ones. The ranks of an attention group have the same tokens, so a rank
sends rows only to those with its own place in the other groups: together they reach every rank, and
what is left to add up lies within the group, where the layer sums anyway.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from batchmla.layers.block import Block
from batchmla.parallel import Par

FOREIGN = -1  # the id of an expert that another rank holds
PIECE_CHOICES = 16_384  # computed at a time: products and not weights take the time then


class ExpertsCall(Protocol):
    """An experts op with its weights: ids count this rank's experts."""

    def __call__(
        self, x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor
    ) -> torch.Tensor: ...


@runtime_checkable
class Serving(Protocol):
    """A layer that groups may hold together: in steps in which this rank has no tokens it serves
    others."""

    def serve(self, dtype: torch.dtype, device: torch.device) -> None: ...


class SpreadExperts(Block):
    """Σ weight · expert(x), as far as this rank and those with its place in other groups hold it.

    With several attention groups every rank must call `forward` or `serve_with` the same number of
    times, in the same order.
    """

    def __init__(self, par: Par, num_experts: int, width: int, active: int) -> None:
        placement = par.placement
        self._par = par
        self._num_experts = num_experts
        self._mine = placement.expert_ids(num_experts)
        self._width = width
        self._active = active
        self._counts_E: torch.Tensor | None = None
        holders = [placement.at_group(group) for group in range(placement.attention_data)]
        self._firsts = [each.expert_ids(num_experts).start for each in holders]

    @property
    def is_whole(self) -> bool:
        """Whether one rank has all experts, each of them whole or a share of it."""
        return self._par.placement.expert == 1

    @property
    def chosen(self) -> torch.Tensor:
        """How often each expert of the layer was chosen by tokens of this group: int64 [E], on the
        CPU."""
        if self._counts_E is None:
            return torch.zeros(self._num_experts, dtype=torch.int64)
        return self._counts_E.cpu()

    def forward(
        self, run: ExpertsCall, x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor
    ) -> torch.Tensor:
        """[T, M] → [T, M]; the caller sums over the ranks of the group."""
        if not self.is_whole:
            self._count(ids_TA)
        if self._par.placement.attention_data == 1:
            if self.is_whole:
                return run(x_TM, weights_TA, ids_TA)
            return _run_own(run, x_TM, weights_TA, _local(ids_TA, self._mine))
        if self._par.is_ordered:
            return self._exchange_choices(run, x_TM, weights_TA, ids_TA)
        return self._exchange(run, x_TM, weights_TA, ids_TA)

    def serve_with(self, run: ExpertsCall, dtype: torch.dtype, device: torch.device) -> None:
        """For other groups alone, in a step in which this rank's has no tokens."""
        if self._par.placement.attention_data > 1:
            active = 1 if self._par.is_ordered else self._active
            none_0A = torch.empty(0, active, device=device)
            x_0M = torch.empty(0, self._width, dtype=dtype, device=device)
            self._exchange(run, x_0M, none_0A, none_0A.long())

    def _exchange_choices(
        self, run: ExpertsCall, x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor
    ) -> torch.Tensor:
        """Each choice by itself, so that a token's experts are summed as it chose them, wherever
        they are: bit for bit what one rank makes of them by torch's products."""
        num_choices, active = ids_TA.numel(), ids_TA.shape[1]
        ids_X1 = ids_TA.reshape(num_choices, 1)
        x_XM = x_TM.repeat_interleave(active, dim=0)
        out_XM = self._exchange(run, x_XM, torch.ones_like(ids_X1, dtype=torch.float32), ids_X1)
        return F.embedding_bag(
            torch.arange(num_choices, device=x_TM.device).view(ids_TA.shape),
            out_XM,
            mode="sum",
            per_sample_weights=weights_TA.to(x_TM.dtype),
        )

    def _exchange(
        self, run: ExpertsCall, x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor
    ) -> torch.Tensor:
        """A row for every group in which one of the token's experts is; one sum for each of these
        comes back, to be added in the groups' order. No rows are kept once they are read."""
        count = len(self._mine)
        firsts_G11 = torch.tensor(self._firsts, device=x_TM.device)[:, None, None]
        local_GTA = ids_TA - firsts_G11
        is_there_GTA = (local_GTA >= 0) & (local_GTA < count)
        group_X, row_X = is_there_GTA.any(dim=2).nonzero(as_tuple=True)
        ids_XA = local_GTA.where(is_there_GTA, FOREIGN)[group_X, row_X]
        sent = torch.bincount(group_X, minlength=len(self._firsts)).tolist()
        received = self._par.swap_counts(sent, x_TM.device)
        packed_XB = _pack(x_TM[row_X], weights_TA[row_X], ids_XA)
        got_RB = self._par.swap_rows(packed_XB, sent, received)
        del packed_XB
        x_RM, weights_RA, ids_RA = _unpack(got_RB, self._width, ids_TA.shape[1], x_TM.dtype)
        out_RM = _run_own(run, x_RM, weights_RA, ids_RA, is_whole=self.is_whole)
        del got_RB, x_RM
        back_XM = self._par.swap_rows(out_RM, received, sent)
        del out_RM
        out_TM = torch.zeros(x_TM.shape, dtype=torch.float32, device=x_TM.device)
        return out_TM.index_add_(0, row_X, back_XM.float()).to(x_TM.dtype)

    def _count(self, ids_TA: torch.Tensor) -> None:
        counts_E = torch.bincount(ids_TA.flatten(), minlength=self._num_experts)
        self._counts_E = counts_E if self._counts_E is None else self._counts_E + counts_E


def row_bytes(width: int, active: int, itemsize: int) -> int:
    """Of a token on its way to its experts: its values, weights and ids."""
    return width * itemsize + active * 8


def _local(ids_TA: torch.Tensor, mine: range) -> torch.Tensor:
    """Counted among `mine`, or foreign."""
    is_mine_TA = (ids_TA >= mine.start) & (ids_TA < mine.stop)
    return (ids_TA - mine.start).where(is_mine_TA, FOREIGN)


def _run_own(
    run: ExpertsCall,
    x_RM: torch.Tensor,
    weights_RA: torch.Tensor,
    ids_RA: torch.Tensor,
    *,
    is_whole: bool = False,
) -> torch.Tensor:
    """The part of the sum that this rank's experts make, however many are chosen a piece of the
    choices at a time; with `is_whole` no id is foreign, and all go at once."""
    if not len(x_RM):
        return x_RM
    if is_whole:
        return run(x_RM.contiguous(), weights_RA, ids_RA)
    is_mine_RA = ids_RA >= 0
    row_X = is_mine_RA.nonzero(as_tuple=True)[0]
    if ids_RA.shape[1] == 1 and len(row_X) == len(x_RM):
        return run(x_RM.contiguous(), weights_RA, ids_RA)
    out_RM = torch.zeros(x_RM.shape, dtype=torch.float32, device=x_RM.device)
    weights_X1, ids_X1 = weights_RA[is_mine_RA][:, None], ids_RA[is_mine_RA][:, None]
    for first in range(0, len(row_X), PIECE_CHOICES):
        piece = slice(first, first + PIECE_CHOICES)
        own_XM = run(x_RM[row_X[piece]], weights_X1[piece], ids_X1[piece]).float()
        out_RM.index_add_(0, row_X[piece], own_XM)
        del own_XM  # before the next ones are made
    return out_RM.to(x_RM.dtype)


def _pack(x_XM: torch.Tensor, weights_XA: torch.Tensor, ids_XA: torch.Tensor) -> torch.Tensor:
    """One row of bytes a token: values, float32 weights, int32 ids."""
    parts = (x_XM.contiguous(), weights_XA.float().contiguous(), ids_XA.int().contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def _unpack(
    rows_RB: torch.Tensor, width: int, active: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, which stay where they lie, weights and int64 ids."""
    sizes = [width * dtype.itemsize, active * 4, active * 4]
    x_RB, weights_RB, ids_RB = torch.split(rows_RB, sizes, 1)
    return (
        x_RB.view(dtype),
        weights_RB.contiguous().view(torch.float32),
        ids_RB.contiguous().view(torch.int32).long(),
    )
