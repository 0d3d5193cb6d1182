"""Model and cache of one rank: what every rank does in a step, told by numbers on the host alone.

N rows whose logits are wanted, M model width, V vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from batchmla.engine.step import StepTables
from batchmla.errors import DeviceError
from batchmla.kv.cache import make_cache
from batchmla.kv.lanes import Copy
from batchmla.kv.layout import KVLayout
from batchmla.models.base import Model

_CPU_WORDS = ("can't allocate memory", "not enough memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step, the same on every rank.

    Pages are zeroed and lanes copied before the forward pass; `scored` are ranges of its rows whose
    logits are wanted before those of `tables.logits_rows_N`.
    """

    tables: StepTables
    copies: Items[Copy] = ()
    cleared_pages: Items[int] = ()
    scored: Items[range] = ()


class Forward:
    """Owns the cache tensors; the page ids come from the scheduler."""

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        num_pages: int,
        num_lanes: int,
        device: torch.device,
        *,
        is_exact: bool = False,
    ) -> None:
        """`is_exact` marks every step; the model must be built with exact ops then."""
        self._model = model
        self._is_exact = is_exact
        self._layout = layout
        self._device = device
        try:
            self._cache = make_cache(layout, num_pages, device, num_lanes)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise DeviceError(
                f"the KV pool of {num_pages * layout.page_bytes} bytes could not be allocated; "
                "lower model.memory_utilization"
            ) from error

    def run(self, work: Work) -> Iterator[torch.Tensor]:
        """Float32 logits [N, V] of every scored range, then of the rows that are sampled, if any.

        Must be taken to its end, in inference mode, and on every rank.
        """
        self._clear(work.cleared_pages)
        self._copy_lanes(work.copies)
        step = work.tables.on(self._device, self._layout.page_tokens, is_exact=self._is_exact)
        hidden_TM = self._model.forward(step, self._model.plan(step), self._cache)
        for rows in work.scored:
            yield self._model.logits(hidden_TM[rows.start : rows.stop])
        if len(step.logits_rows_N):
            yield self._model.logits(hidden_TM[step.logits_rows_N])

    def _clear(self, pages: Items[int]) -> None:
        """Zeroes pages that may hold non-finite rows: masked or not, those would poison their next
        holder.
        """
        if not pages:
            return
        rows = torch.tensor(pages, device=self._device)
        for layer, parts in zip(self._cache, self._layout.layers, strict=True):
            for part in parts:
                if part.window is None:
                    layer[part.name][rows] = 0

    def _copy_lanes(self, copies: Items[Copy]) -> None:
        """One after the other: a lane may be written and read again."""
        for source, target in copies:
            for layer, parts in zip(self._cache, self._layout.layers, strict=True):
                for part in parts:
                    if part.window is not None:
                        layer[part.name][target] = layer[part.name][source]


class StepOutOfMemory(DeviceError):
    """A step did not fit; nothing of it counts, and a smaller one may."""


def is_out_of_memory(error: Exception) -> bool:
    """CUDA has a class for it; the CPU allocator raises a plain RuntimeError."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or any(words in str(error) for words in _CPU_WORDS)


def out_of_memory(num_tokens: int) -> StepOutOfMemory:
    """What is said of a step of so many tokens that did not fit."""
    return StepOutOfMemory(
        f"the device ran out of memory in a step of {num_tokens} tokens; lower "
        "engine.max_batched_tokens, engine.max_num_seqs or model.memory_utilization"
    )
