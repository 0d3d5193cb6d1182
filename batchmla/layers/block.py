"""Weights as named places, and the tree of blocks that holds them; knows no checkpoint."""

from collections.abc import Iterator

import torch

from batchmla.kernels.ops import Ops, Packed, PackKind
from batchmla.kernels.quant import Quantised


class Weight:
    """A place for one tensor of this rank; empty until it is filled.

    `is_float32` keeps the values in float32 whatever the model's dtype; `is_integer` says that they
    are ids. `active_share` is the share
    of the elements that one token uses. A `tied` weight takes its values from another one.
    `offset` is added to the values that it is filled with.
    """

    def __init__(
        self,
        *shape: int,
        kind: PackKind = PackKind.PLAIN,
        is_float32: bool = False,
        is_integer: bool = False,
        active_share: float = 1.0,
        tied: "Weight | None" = None,
        offset: float = 0.0,
    ) -> None:
        self.shape = shape
        self.kind = kind
        self.is_float32 = is_float32
        self.is_integer = is_integer
        self.active_share = active_share
        self.tied = tied
        self.offset = offset
        self.packed: Packed
        self.tensor: torch.Tensor  # PLAIN weights only

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype the values are held in."""
        if self.is_integer:
            return torch.int32
        return torch.float32 if self.is_float32 else model_dtype

    def fill(self, tensor: torch.Tensor | Quantised, ops: Ops) -> None:
        """Packs the values; the caller drops `tensor`. PLAIN weights are never quantised."""
        assert tuple(tensor.shape) == self.shape, f"{tuple(tensor.shape)} into {self.shape}"
        if isinstance(tensor, torch.Tensor) and self.offset:
            tensor = tensor + self.offset
        self.packed = ops.pack(self.kind, tensor)
        if self.kind is PackKind.PLAIN:
            assert isinstance(tensor, torch.Tensor), f"a quantised weight of shape {self.shape}"
            self.tensor = tensor

    @property
    def is_filled(self) -> bool:
        return hasattr(self, "packed")


class Block:
    """A part of a model; its weights are found by walking its attributes."""

    def named_weights(self, prefix: str = "") -> Iterator[tuple[str, Weight]]:
        """Dotted names, as the rules' targets spell them."""
        for name, value in vars(self).items():
            yield from _walk(value, f"{prefix}{name}")


def walk(root: object) -> Iterator[Block]:
    """`root`, if it is a block, and all blocks inside, in the order of their attributes."""
    if isinstance(root, Block):
        yield root
        for value in vars(root).values():
            yield from walk(value)
    elif isinstance(root, tuple):
        for item in root:
            yield from walk(item)


def _walk(value: object, name: str) -> Iterator[tuple[str, Weight]]:
    if isinstance(value, Weight):
        yield name, value
    elif isinstance(value, Block):
        yield from value.named_weights(f"{name}.")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _walk(item, f"{name}.{index}")
