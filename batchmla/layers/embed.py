"""Token embedding and output head, cut by vocabulary. T tokens, N rows, M width, V vocabulary."""

import torch
import torch.nn.functional as F

from batchmla.kernels.ops import Ops, PackKind
from batchmla.layers.block import Block, Weight
from batchmla.parallel import Par


class Embedding(Block):
    """This rank's rows; ids of other ranks give zeros and the ranks are summed."""

    def __init__(self, par: Par, vocab_size: int, width: int) -> None:
        self._rows = par.placement.local(vocab_size, "vocabulary entries")
        self.weight = Weight(self._rows, width)
        self._par = par

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """[T] → [T, M]."""
        if self._par.placement.tensor == 1:
            return F.embedding(tokens_T, self.weight.tensor)
        local_T = tokens_T - self._rows * self._par.placement.tensor_rank
        is_mine_T = (local_T >= 0) & (local_T < self._rows)
        rows_TM = F.embedding(local_T.where(is_mine_T, 0), self.weight.tensor)
        return self._par.sum(rows_TM.masked_fill_(~is_mine_T[:, None], 0))


class Head(Block):
    """Logits in float32 over the whole vocabulary, the same on every rank."""

    def __init__(
        self, par: Par, ops: Ops, vocab_size: int, width: int, tied: Embedding | None = None
    ) -> None:
        rows = par.placement.local(vocab_size, "vocabulary entries")
        source = None if tied is None else tied.weight
        self.weight = Weight(rows, width, kind=PackKind.LOGITS, tied=source)
        self._par = par
        self._linear = ops.linear

    def forward(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        """[N, M] → [N, V]."""
        return self._par.gather(self._linear(hidden_NM, self.weight.packed, None))
