"""Linear layers: whole, cut by outputs, cut by inputs. T tokens, I/O features of this rank."""

import torch

from batchmla.kernels.ops import Ops, PackKind
from batchmla.layers.block import Block, Weight
from batchmla.parallel import Par


class Linear(Block):
    """Several projections of one input as one product; `parts` are their output widths on this
    rank.

    Whether a part is whole or this rank's share is said by the family's rules; the layer adds no
    communication.
    """

    def __init__(self, ops: Ops, in_features: int, *parts: int, has_bias: bool = False) -> None:
        self.parts = parts
        self.weight = Weight(sum(parts), in_features, kind=PackKind.LINEAR)
        self.bias = Weight(sum(parts)) if has_bias else None
        self._linear = ops.linear

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] → [T, sum of parts]."""
        bias = None if self.bias is None else self.bias.tensor
        return self._linear(x_TI, self.weight.packed, bias)


class ColLinear(Linear):
    """A `Linear` whose parts are all cut by outputs: widths are given whole. `groups`: attention
    groups that cut a rank's share further."""

    def __init__(
        self,
        par: Par,
        ops: Ops,
        in_features: int,
        *parts: int,
        has_bias: bool = False,
        groups: int = 1,
    ) -> None:
        shares = (par.placement.local(part, "output features") // groups for part in parts)
        super().__init__(ops, in_features, *shares, has_bias=has_bias)


class RowLinear(Linear):
    """Cut by inputs; the products of a group's ranks are summed unless the caller sums later, as it
    must where `groups` cut a rank's share further."""

    def __init__(
        self,
        par: Par,
        ops: Ops,
        in_features: int,
        out_features: int,
        *,
        is_summed: bool = True,
        groups: int = 1,
    ) -> None:
        share = par.placement.local(in_features, "input features") // groups
        super().__init__(ops, share, out_features)
        self._par = par if is_summed else None

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] → [T, O]."""
        y_TO = super().forward(x_TI)
        return y_TO if self._par is None else self._par.sum(y_TO)
