"""Token embedding and output head. T tokens and N rows of this rank's attention group, G groups, M
width, V vocabulary.

The ranks of a group cut both by vocabulary. With several groups they hold columns of the embedding
and entries of the head together, where their number divides these: ids go to all groups and columns
come back, hidden rows go and logits come back. A head that is tied to the embedding stays whole in
every group, and the embedding with it.
"""

import torch
import torch.nn.functional as F

from batchmla.kernels.ops import Ops, PackKind
from batchmla.layers.across import back, to_all
from batchmla.layers.block import Block, Weight
from batchmla.parallel import Par


class Embedding(Block):
    """This rank's rows, or columns of them; ids of other ranks of a group give zeros and the ranks
    are summed."""

    def __init__(self, par: Par, vocab_size: int, width: int, *, is_tied: bool) -> None:
        """`is_tied`: the head has no weights of its own."""
        self._rows = par.placement.local(vocab_size, "vocabulary entries")
        self._groups = 1 if is_tied else par.placement.common(width)
        self.weight = Weight(self._rows, width // self._groups)
        self._par = par

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """[T] → [T, M]."""
        if self._groups == 1:
            return self._par.sum(self._look_up(tokens_T))
        parts_GTX = self._exchange(tokens_T)
        return self._par.sum(parts_GTX.transpose(0, 1).flatten(1))

    def serve(self, dtype: torch.dtype, device: torch.device) -> None:
        """See `Serving`."""
        if self._groups > 1:
            self._exchange(torch.empty(0, dtype=torch.int64, device=device))

    def _exchange(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """[T] → [G, T, M / G]: the columns of every group."""
        counts = self._par.group_rows
        tokens_R = to_all(self._par, tokens_T[:, None], counts)[:, 0]
        return back(self._par, self._look_up(tokens_R), counts)

    def _look_up(self, tokens_T: torch.Tensor) -> torch.Tensor:
        if self._par.placement.tensor == 1:
            return F.embedding(tokens_T, self.weight.tensor)
        local_T = tokens_T - self._rows * self._par.placement.tensor_rank
        is_mine_T = (local_T >= 0) & (local_T < self._rows)
        rows_TM = F.embedding(local_T.where(is_mine_T, 0), self.weight.tensor)
        return rows_TM.masked_fill_(~is_mine_T[:, None], 0)


class Head(Block):
    """Logits in float32 over the whole vocabulary, the same on every rank of a group.

    What is cut over groups is called equally often on all ranks: a rank whose group wants no more
    logits serves.
    """

    def __init__(
        self, par: Par, ops: Ops, vocab_size: int, width: int, tied: Embedding | None = None
    ) -> None:
        rows = par.placement.local(vocab_size, "vocabulary entries")
        source = None if tied is None else tied.weight
        self._groups = 1 if tied is not None else par.placement.common(rows)
        self._width = width
        self.weight = Weight(rows // self._groups, width, kind=PackKind.LOGITS, tied=source)
        self._par = par
        self._linear = ops.linear

    def forward(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        """[N, M] → [N, V]."""
        if self._groups == 1:
            return self._par.gather(self._linear(hidden_NM, self.weight.packed, None))
        parts_GNV = self._exchange(hidden_NM)
        return self._par.gather(parts_GNV.transpose(0, 1).flatten(1))

    def serve(self, dtype: torch.dtype, device: torch.device) -> None:
        """Once, for other groups alone."""
        if self._groups > 1:
            self._exchange(torch.empty(0, self._width, dtype=dtype, device=device))

    def _exchange(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        """[N, M] → [G, N, V]: entries of every group."""
        counts = self._par.group_rows
        hidden_RM = to_all(self._par, hidden_NM, counts)
        return back(self._par, self._linear(hidden_RM, self.weight.packed, None), counts)
