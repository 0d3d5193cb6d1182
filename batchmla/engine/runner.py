"""Runs the chunks of a schedule and draws the tokens due: the rank that knows the sequences.

V vocabulary.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from batchmla.engine.forward import (
    Forward,
    GroupWork,
    StepOutOfMemory,
    Work,
    is_out_of_memory,
    out_of_memory,
)
from batchmla.engine.group import Chunk
from batchmla.engine.late import Late
from batchmla.engine.logprobs import score
from batchmla.engine.sampler import Draw, Pending, Sampler
from batchmla.engine.sequence import Sequence
from batchmla.engine.step import StepTables, step_tables
from batchmla.engine.stream import put
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One attention group's part of a step, and what its logits are for: log-probabilities of
    prompts, then draws."""

    work: GroupWork
    scored: Items[tuple[Chunk, range]]
    due: Items[Sequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A step that has been begun: its chunks, and the draws that are due in their order."""

    chunks: Items[Chunk]
    pending: Items[Pending]
    began_s: float

    def ids_of(self, sequences: Items[Sequence], device: torch.device) -> torch.Tensor:
        """int64 [N]: what is drawn for these sequences, where it is."""
        due = [chunk.sequence for chunk in self.chunks if chunk.samples]
        place = {sequence: index for index, sequence in enumerate(due)}
        places_N = np.array([place[sequence] for sequence in sequences], np.int64)
        ids = [each.ids_N for each in self.pending]
        all_ids = ids[0] if len(ids) == 1 else torch.cat(ids)
        return all_ids.index_select(0, put(places_N, device))


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
        self._blank_pages: dict[int, list[int]] = {}

    def run(self, chunks: Items[Chunk], copies: Items[Items[Copy]]) -> list[Draw | None]:
        """`begin` and `end`."""
        return self.end(self.begin(chunks, copies))

    def end(self, started: Started) -> list[Draw | None]:
        """For every chunk the draw for its sequence, None where none is due."""
        draws = iter([draw for each in started.pending for draw in each.wait()])
        return [next(draws) if chunk.samples else None for chunk in started.chunks]

    @torch.inference_mode()
    def begin(
        self, chunks: Items[Chunk], copies: Items[Items[Copy]], before: Started | None = None
    ) -> Started:
        """One forward pass, once lanes are copied in each attention group. Chunks come group by
        group; of sequences that are ahead the last token comes from `before`. After a
        `StepOutOfMemory` they can be computed again, but lanes hold anything."""
        began_s = time.perf_counter()
        blank, self._blank_pages = self._blank_pages, {}
        parts = [
            self._part(
                [each for each in chunks if each.sequence.group == group],
                copied,
                blank.get(group, ()),
                before,
            )
            for group, copied in enumerate(copies)
        ]
        work = Work(groups=tuple(part.work for part in parts))
        try:
            with self._explained(work):
                self._send(work)
                pending = self._draw(parts, self._forward.run(work))
        except StepOutOfMemory:
            self._blank_pages = blank
            raise
        return Started(chunks=chunks, pending=pending, began_s=began_s)

    @torch.inference_mode()
    def count_experts(self, num_groups: int) -> list[list[int]]:
        """How often each expert of each layer was chosen so far, on all ranks."""
        nothing = tuple(GroupWork(tables=None) for _ in range(num_groups))
        work = Work(groups=nothing, counts_experts=True)
        with self._explained(work):
            self._send(work)
            for _ in self._forward.run(work):
                pass
        return self._forward.expert_counts

    def _part(
        self,
        chunks: Items[Chunk],
        copies: Items[Copy],
        cleared: Items[int],
        before: Started | None,
    ) -> _Part:
        if not chunks:
            work = GroupWork(tables=None, copies=copies, cleared_pages=cleared)
            return _Part(work=work, scored=[], due=[])
        tables = step_tables(chunks, self._page_tokens)
        scored = [
            (chunk, targets, range(first, first + len(targets)))
            for start, chunk in zip(tables.starts_S1[:-1].tolist(), chunks, strict=True)
            for targets, first in _scored(chunk, start)
        ]
        work = GroupWork(
            tables=tables,
            late=None if before is None else self._late(chunks, tables, before),
            copies=copies,
            cleared_pages=cleared,
            scored=[rows for _, _, rows in scored],
        )
        return _Part(
            work=work,
            scored=[(chunk, targets) for chunk, targets, _ in scored],
            due=[chunk.sequence for chunk in chunks if chunk.samples],
        )

    def _late(self, chunks: Items[Chunk], tables: StepTables, before: Started) -> Late | None:
        """The rows of tokens that `before` draws."""
        rows: list[int] = []
        sequences: list[Sequence] = []
        for start, chunk in zip(tables.starts_S1[:-1].tolist(), chunks, strict=True):
            if chunk.sequence.is_ahead and chunk.samples:
                rows.append(start + chunk.num_tokens - 1)
                sequences.append(chunk.sequence)
        if not rows:
            return None
        ids_N = before.ids_of(sequences, self._sampler.device)
        return Late(rows_N=np.array(rows, np.int64), ids_N=ids_N)

    def _draw(self, parts: Items[_Part], logits: Iterator[torch.Tensor]) -> list[Pending]:
        """Takes all logits of a step in the order in which they come, the first of every group
        before the second of one; draws are in the groups' order."""
        draws: dict[int, Pending] = {}
        for at in range(1 + max(len(part.scored) for part in parts)):
            for group, part in enumerate(parts):
                if at < len(part.scored):
                    self._score_prompt(next(logits), *part.scored[at])
                elif at == len(part.scored) and part.due:
                    draws[group] = self._sampler.begin(next(logits), part.due)
        for _ in logits:
            raise AssertionError("logits that nobody wants")
        return [draws[group] for group in sorted(draws)]

    def _send(self, work: Work) -> None:
        if self._followers is not None:
            self._followers.send(work)

    @contextmanager
    def _explained(self, work: Work) -> Iterator[None]:
        """What is raised inside, as the engine is to be told. Ranks that ran out of memory are out
        of step with each other: there is no smaller step then."""
        try:
            yield
        except DeviceError as error:
            if self._followers is None:
                raise
            raise self._followers.explain(error) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # without a name, which would keep the step's frames
            raise self._lacking(work.num_tokens) from error

    def _lacking(self, num_tokens: int) -> DeviceError:
        found = out_of_memory(num_tokens)
        return found if self._followers is None else DeviceError(str(found))

    def forget(self, sequence: Sequence) -> None:
        """The sequence left the running ones."""
        self._sampler.forget(sequence)

    def forget_all(self) -> None:
        """Every sequence left."""
        self._sampler.forget_all()

    def clear(self, pages: Items[int], group: int) -> None:
        """Pages whose rows may not be finite; they are zeroed before the next forward pass."""
        self._blank_pages.setdefault(group, []).extend(pages)

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
        scores.is_finite = scores.is_finite and bool(torch.isfinite(logits_RV).all())
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
