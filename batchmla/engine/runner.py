"""Model, cache and sampler of one rank: runs the chunks of a schedule and draws the tokens due.

N rows that are sampled, M model width, V vocabulary.
"""

from collections.abc import Sequence as Items

import torch

from batchmla.engine.group import Chunk
from batchmla.engine.logprobs import score
from batchmla.engine.sampler import Draw, Sampler
from batchmla.engine.sequence import Sequence
from batchmla.engine.step import build_step
from batchmla.errors import DeviceError
from batchmla.kv.cache import make_cache
from batchmla.kv.lanes import Copy
from batchmla.kv.layout import KVLayout
from batchmla.models.base import Model

SCORED_ROWS = 64  # of a prompt whose logits are in memory at a time


class Runner:
    """Owns the cache tensors; the page ids come from the scheduler."""

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        num_pages: int,
        num_lanes: int,
        sampler: Sampler,
        device: torch.device,
        *,
        is_exact: bool = False,
    ) -> None:
        """`is_exact` marks every step; the model must be built with exact ops then."""
        self._model = model
        self._is_exact = is_exact
        self._sampler = sampler
        self._layout = layout
        self._device = device
        try:
            self._cache = make_cache(layout, num_pages, device, num_lanes)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise DeviceError(
                f"the KV pool of {num_pages * layout.page_bytes} bytes could not be allocated; "
                "lower model.memory_utilization"
            ) from error

    @torch.inference_mode()
    def run(self, chunks: Items[Chunk], copies: Items[Copy] = ()) -> list[Draw | None]:
        """One forward pass, once lanes are copied; for every chunk the draw for its sequence, None
        where none is due."""
        self._copy_lanes(copies)
        step = build_step(chunks, self._layout.page_tokens, self._device, is_exact=self._is_exact)
        due = [chunk.sequence for chunk in chunks if chunk.samples]
        special = [place for place, chunk in enumerate(chunks) if chunk.sequence.extras is not None]
        scored = [place for place in special if chunks[place].sequence.scores_prompt]
        try:
            hidden_TM = self._model.forward(step, self._model.plan(step), self._cache)
            for place in scored:
                first = int(step.host_starts_S1[place])
                self._score_prompt(hidden_TM[first:], chunks[place])
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

    def _score_prompt(self, hidden_TM: torch.Tensor, chunk: Chunk) -> None:
        """Log-probabilities of the prompt's tokens that the chunk's rows, the first of `hidden`,
        tell.
        """
        extras = chunk.sequence.extras
        assert extras is not None and extras.prompt_scores is not None, "asked for no scores"
        scores = extras.prompt_scores
        targets = scores.targets(chunk.start, chunk.num_tokens)
        for first in range(targets.start, targets.stop, SCORED_ROWS):
            last = min(first + SCORED_ROWS, targets.stop)
            rows_RM = hidden_TM[first - 1 - chunk.start : last - 1 - chunk.start]
            logits_RV = self._sampler.real(self._model.logits(rows_RM))
            is_finite_R = torch.isfinite(logits_RV).all(dim=1)
            if not bool(is_finite_R.all()) and scores.bad_position is None:
                scores.bad_position = first + int((~is_finite_R).nonzero()[0])
            ids = chunk.sequence.tokens.view[first:last].tolist()
            scores.push(score(logits_RV, ids, [scores.num_likely] * len(ids)))

    def _draw(self, hidden_NM: torch.Tensor, sequences: Items[Sequence]) -> list[Draw]:
        if not sequences:
            return []
        return self._sampler.draw(self._model.logits(hidden_NM), sequences)


def _is_out_of_memory(error: Exception) -> bool:
    """CUDA has a class for it; the CPU allocator raises a plain RuntimeError."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or "can't allocate memory" in str(error)
