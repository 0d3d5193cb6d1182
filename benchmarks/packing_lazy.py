"""The simulated engine without a look at every row of every step: the same steps in the same time.

A completion under way takes one token a step, so that all of it is known when it begins: the steps
that fill a page, and its last one. These are events in a calendar; between them a row is not
touched, and its numbers are brought up to date when somebody asks for them. Prompts, admission,
pages, preemption and the clock are those of the plain form.
"""

from collections import defaultdict
from collections.abc import Sequence as Items
from itertools import chain

from packing_machines import Machine
from packing_plain import GENERATED_ID, Clock, SimulatedEngine

from batchmla.core import Completion
from batchmla.engine.forecast import Forecast
from batchmla.engine.group import Chunk, Group, Limits
from batchmla.engine.scheduler import Scheduler, _Room
from batchmla.engine.sequence import Sequence
from batchmla.kv.pages import PageTable

Entry = tuple[Sequence, int]  # a row, and its offset when it was entered


class ScatteredPages(PageTable):
    """Pages that are taken where the next blank ones are: their numbers mean nothing here."""

    def _find_run(self, wanted: int, room: int) -> list[int]:
        is_blank_P = self._is_blank_P
        start = self._cursor + int(is_blank_P[self._cursor :].argmax())
        if not is_blank_P[start]:
            start = int(is_blank_P.argmax())
        stretch = is_blank_P[start : start + wanted]
        count = len(stretch) if stretch.all() else int(stretch.argmin())
        self._cursor = (start + count) % self.num_pages
        return list(range(start, start + count))


class LazyScheduler(Scheduler):
    """`step` counts steps. A row under way has `step + offset` tokens, of which one is to be
    computed in this step.
    """

    def __init__(self, tables: Items[PageTable], limits: Limits, clock: Clock) -> None:
        super().__init__(tables, limits)
        assert len(tables) == 1 and limits.snapshot_lanes == 0, "one group, no lanes"
        assert limits.max_num_seqs <= limits.max_batched_tokens, "every row has a token a step"
        self.step = 0
        self._clock = clock
        self._offsets: dict[Sequence, int] = {}
        self._offset_sum = 0
        self._prompts: list[Sequence] = []  # that want more than a token, oldest first
        self._growing: list[Entry] = []  # whose pages are full
        self._fills: defaultdict[int, list[Entry]] = defaultdict(list)  # by step
        self._ends: defaultdict[int, list[Entry]] = defaultdict(list)

    @property
    def num_decodes(self) -> int:
        """Rows under way."""
        return len(self._offsets)

    @property
    def context_tokens(self) -> int:
        """Of all rows under way, with the one that each computes in this step."""
        return len(self._offsets) * self.step + self._offset_sum

    def computed_decodes(self) -> None:
        """Publishes the pages that rows under way have filled in this step."""
        for row in self._due(self._fills.pop(self.step, [])):
            offset = self._offsets[row]
            self._sync(row)
            self.groups[0].computed(Chunk(row, row.computed, 1, True))
            self._growing.append((row, offset))
            page_tokens = self.groups[0].pages.page_tokens
            self._fills[self.step + page_tokens].append((row, offset))

    def ended(self) -> list[Sequence]:
        """The rows under way whose last step this is, oldest first; they are so no more."""
        rows = self._due(self._ends.pop(self.step, []))
        for row in rows:
            self._leave(row)
        return rows

    def next_step(self, chunks: Items[Chunk]) -> None:
        """After the draws of a step in which these prompts were computed."""
        self.step += 1
        page_tokens = self.groups[0].pages.page_tokens
        waiting = dict.fromkeys(chain(self._prompts, (chunk.sequence for chunk in chunks)))
        self._prompts = []
        for row in waiting:
            if row.is_over:
                continue
            if row.wanted > 1:
                self._prompts.append(row)
                continue
            offset = row.num_tokens - self.step
            self._offsets[row] = offset
            self._offset_sum += offset
            if row.num_tokens > len(row.pages) * page_tokens:
                self._growing.append((row, offset))
            self._fills[self.step + -row.num_tokens % page_tokens].append((row, offset))
            self._ends[self.step + self._clock.steps_left(row)].append((row, offset))
        self._prompts.sort(key=_arrival)

    def _go_on(self, group: Group, may_preempt: bool) -> _Room:
        growing, self._growing = self._growing, []
        for row in self._due(growing):
            if row in self._offsets:  # not preempted for an older one
                self._sync(row)
                self._make_room(group, row)
        return self._with_prompts(group, [], self._prompts, self.num_decodes, self.context_tokens)

    def _forecast(self, group: Group) -> Forecast:
        for row in self._offsets:
            self._count(row)
        return super()._forecast(group)

    def _preempt(self, sequence: Sequence) -> None:
        if sequence in self._offsets:
            self._leave(sequence)
        else:
            self._prompts.remove(sequence)
        super()._preempt(sequence)

    def _due(self, entries: list[Entry]) -> list[Sequence]:
        """Those that have not left since."""
        rows = [row for row, offset in entries if self._offsets.get(row) == offset]
        rows.sort(key=_arrival)
        return rows

    def _leave(self, row: Sequence) -> None:
        self._sync(row)
        self._offset_sum -= self._offsets.pop(row)

    def _count(self, row: Sequence) -> None:
        num_tokens = self.step + self._offsets[row]
        row.num_generated += num_tokens - row.num_tokens
        row.num_tokens = num_tokens
        row.computed = num_tokens - 1

    def _sync(self, row: Sequence) -> None:
        self._count(row)
        missing = row.num_tokens - len(row.tokens)
        if missing:
            row.tokens.extend([GENERATED_ID] * missing)


class LazyEngine(SimulatedEngine):
    """The engine with the calendar."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        super().__init__(machine, clock)
        pages = ScatteredPages(machine.pool_tokens // machine.page_tokens, machine.page_tokens)
        self._lazy = LazyScheduler([pages], self._scheduler.limits, clock)
        clock.pages = pages
        self._scheduler = self._lazy
        self._clock = clock

    def _step(self) -> list[Completion]:
        lazy = self._lazy
        chunks = lazy.schedule()
        decodes = lazy.num_decodes
        assert chunks or decodes, f"nothing to run with {lazy.num_waiting} sequences waiting"
        draws = self._clock.run_with(chunks, decodes=decodes, context_tokens=lazy.context_tokens)
        lazy.computed_decodes()
        lazy.computed(chunks)
        completions = [self._end(row) for row in lazy.ended()]
        for chunk, draw in zip(chunks, draws, strict=True):
            if draw is not None and (completion := self._take(chunk, draw)) is not None:
                completions.append(completion)
        lazy.next_step(chunks)
        totals = self._totals
        totals.steps += 1
        totals.computed_tokens += decodes + sum(chunk.num_tokens for chunk in chunks)
        return completions

    def _end(self, row: Sequence) -> Completion:
        completion = self._take(Chunk(row, row.computed, 1, True), self._clock.draw(row))
        assert completion is not None, f"row {row.prompt.row_id} goes on"
        return completion


def _arrival(row: Sequence) -> int:
    return row.arrival
