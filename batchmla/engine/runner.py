"""Runs the chunks of a schedule and draws the tokens due: the rank that knows the sequences.

V vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Protocol

import torch

from batchmla.engine.forward import Forward, Work, is_out_of_memory, out_of_memory
from batchmla.engine.group import Chunk
from batchmla.engine.logprobs import score
from batchmla.engine.sampler import Draw, Sampler
from batchmla.engine.sequence import Sequence
from batchmla.engine.step import step_tables
from batchmla.errors import DeviceError
from batchmla.kv.lanes import Copy

SCORED_ROWS = 64  # of a prompt whose logits are in memory at a time


class Followers(Protocol):
    """The other ranks, which do the same work."""

    def send(self, work: Work) -> None:
        """Starts a step on all of them."""
        ...

    def explain(self, error: DeviceError) -> Exception:
        """Why a step failed: the fault of the rank that began it, if one did."""
        ...

    def close(self) -> None:
        """Ends them."""
        ...


class Runner:
    """One forward pass after the other."""

    def __init__(
        self, forward: Forward, sampler: Sampler, page_tokens: int, followers: Followers | None
    ) -> None:
        """`followers` None: there is but this rank."""
        self._forward = forward
        self._sampler = sampler
        self._page_tokens = page_tokens
        self._followers = followers
        self._blank_pages: list[int] = []

    @torch.inference_mode()
    def run(self, chunks: Items[Chunk], copies: Items[Copy] = ()) -> list[Draw | None]:
        """One forward pass, once lanes are copied; for every chunk the draw for its sequence, None
        where none is due. After a `StepOutOfMemory` the chunks can be computed again, but lanes
        hold anything."""
        cleared, self._blank_pages = self._blank_pages, []
        tables = step_tables(chunks, self._page_tokens)
        scored = [
            (chunk, targets, range(first, first + len(targets)))
            for start, chunk in zip(tables.starts_S1[:-1].tolist(), chunks, strict=True)
            for targets, first in _scored(chunk, start)
        ]
        work = Work(
            tables=tables,
            copies=copies,
            cleared_pages=cleared,
            scored=[rows for _, _, rows in scored],
        )
        due = [chunk.sequence for chunk in chunks if chunk.samples]
        try:
            if self._followers is not None:
                self._followers.send(work)
            logits = self._forward.run(work)
            for chunk, targets, _ in scored:
                self._score_prompt(next(logits), chunk, targets)
            draws = iter([draw for each in logits for draw in self._sampler.draw(each, due)])
        except DeviceError as error:
            if self._followers is None:
                raise
            raise self._followers.explain(error) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._blank_pages = cleared + self._blank_pages
            raise out_of_memory(len(tables.tokens_T)) from error
        return [next(draws) if chunk.samples else None for chunk in chunks]

    def forget(self, sequence: Sequence) -> None:
        """The sequence left the running ones."""
        self._sampler.forget(sequence)

    def forget_all(self) -> None:
        """Every sequence left."""
        self._sampler.forget_all()

    def clear(self, pages: Items[int]) -> None:
        """Pages whose rows may not be finite; they are zeroed before the next forward pass."""
        self._blank_pages += pages

    def close(self) -> None:
        """Ends the other ranks."""
        if self._followers is not None:
            self._followers.close()

    def _score_prompt(self, logits_RV: torch.Tensor, chunk: Chunk, targets: range) -> None:
        """Log-probabilities of the prompt's tokens at `targets`, each told by the row before it."""
        extras = chunk.sequence.extras
        assert extras is not None and extras.prompt_scores is not None, "asked for no scores"
        scores = extras.prompt_scores
        logits_RV = self._sampler.real(logits_RV)
        is_finite_R = torch.isfinite(logits_RV).all(dim=1)
        if not bool(is_finite_R.all()) and scores.bad_position is None:
            scores.bad_position = targets.start + int((~is_finite_R).nonzero()[0])
        ids = chunk.sequence.tokens.view[targets.start : targets.stop].tolist()
        scores.push(score(logits_RV, ids, [scores.num_likely] * len(ids)))


def _scored(chunk: Chunk, start: int) -> Iterator[tuple[range, int]]:
    """Positions of the prompt whose log-probabilities a chunk tells, a few at a time, each with the
    first of the step's rows that tell them; `start` is the chunk's first row.
    """
    extras = chunk.sequence.extras
    if extras is None or extras.prompt_scores is None or not chunk.sequence.scores_prompt:
        return
    targets = extras.prompt_scores.targets(chunk.start, chunk.num_tokens)
    for first in range(targets.start, targets.stop, SCORED_ROWS):
        some = range(first, min(first + SCORED_ROWS, targets.stop))
        yield some, start + first - 1 - chunk.start
