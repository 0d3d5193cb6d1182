"""Model, cache and sampler of one rank: runs the chunks of a schedule and draws the tokens due.

N rows that are sampled, M model width, V vocabulary.
"""

from collections.abc import Sequence as Items

import torch

from batchmla.engine.sampler import Draw, Sampler
from batchmla.engine.scheduler import Chunk
from batchmla.engine.sequence import Sequence
from batchmla.engine.step import build_step
from batchmla.errors import DeviceError
from batchmla.kv.cache import make_cache
from batchmla.kv.layout import KVLayout
from batchmla.models.base import Model


class Runner:
    """Owns the cache tensors; the page ids come from the scheduler."""

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        num_pages: int,
        sampler: Sampler,
        device: torch.device,
        *,
        is_exact: bool = False,
    ) -> None:
        """`is_exact` marks every step; the model must be built with exact ops then."""
        self._model = model
        self._is_exact = is_exact
        self._sampler = sampler
        self._page_tokens = layout.page_tokens
        self._device = device
        try:
            self._cache = make_cache(layout, num_pages, device)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise DeviceError(
                f"the KV pool of {num_pages * layout.page_bytes} bytes could not be allocated; "
                "lower model.memory_utilization"
            ) from error

    @torch.inference_mode()
    def run(self, chunks: Items[Chunk]) -> list[Draw | None]:
        """One forward pass; for every chunk the draw for its sequence, None where none is due."""
        step = build_step(chunks, self._page_tokens, self._device, is_exact=self._is_exact)
        due = [chunk.sequence for chunk in chunks if chunk.samples]
        try:
            hidden_TM = self._model.forward(step, self._model.plan(step), self._cache)
            draws = iter(self._draw(hidden_TM[step.logits_rows_N], due))
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise DeviceError(
                f"the device ran out of memory in a step of {len(step.tokens_T)} tokens; lower "
                "engine.max_batched_tokens, engine.max_num_seqs or model.memory_utilization"
            ) from error
        return [next(draws) if chunk.samples else None for chunk in chunks]

    def forget(self, sequence: Sequence) -> None:
        """The sequence left the running ones."""
        self._sampler.forget(sequence)

    def forget_all(self) -> None:
        """Every sequence left."""
        self._sampler.forget_all()

    @torch.inference_mode()
    def clear(self, pages: Items[int]) -> None:
        """Zeroes pages that may hold non-finite rows: masked or not, those would poison their next
        holder.
        """
        if not pages:
            return
        rows = torch.tensor(pages, device=self._device)
        for layer in self._cache:
            for part_PBW in layer.values():
                part_PBW[rows] = 0

    def _draw(self, hidden_NM: torch.Tensor, sequences: Items[Sequence]) -> list[Draw]:
        if not sequences:
            return []
        return self._sampler.draw(self._model.logits(hidden_NM), sequences)


def _is_out_of_memory(error: Exception) -> bool:
    """CUDA has a class for it; the CPU allocator raises a plain RuntimeError."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or "can't allocate memory" in str(error)
