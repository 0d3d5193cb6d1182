"""Signatures of what notes the calls of a step and runs them again. T rows of a step."""

from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

import torch

from batchmla.kernels.groups import Groups


class Unwritable(Exception):
    """Why a step cannot be written down as a script."""


class Script(Protocol):
    """The calls of a step, noted once: it runs steps of up to `capacity` rows."""

    capacity: int

    @property
    def most_rows(self) -> int:
        """The capacity of a script of the same calls that has all memory that one may have."""
        ...

    def run(
        self, inputs: Mapping[Hashable, torch.Tensor], groups: Mapping[Hashable, Groups]
    ) -> torch.Tensor:
        """The step of these inputs, T rows each; what it gives [T, …] is valid until the next."""
        ...

    def result(self, num_rows: int) -> torch.Tensor:
        """[T, …] of the step that ran last, which had so many rows."""
        ...


class WritesScriptOp(Protocol):
    def __call__(
        self,
        run: Callable[[Mapping[Hashable, torch.Tensor]], torch.Tensor],
        inputs: Mapping[Hashable, torch.Tensor],
        groups: Mapping[Hashable, Groups],
        capacity: int,
    ) -> Script:
        """Runs a step on `inputs`, T rows each, and notes what is called meanwhile, for steps of up
        to `capacity` rows. Raises `Unwritable` where it cannot."""
        ...
