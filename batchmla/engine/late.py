"""Tokens of a step that only the device knows when the step is begun."""

from dataclasses import dataclass

import torch

from batchmla.kv.step import HostInts


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """`ids_N` int64, drawn by the step before, belong into `rows_N` of the step."""

    rows_N: HostInts
    ids_N: torch.Tensor
