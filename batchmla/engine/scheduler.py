"""Who gets how many tokens of the next forward pass. Host only; knows no tensors and no model.
There are no phases: a sequence wants `len(tokens) - computed` tokens, whether they are its prompt,
one generated token, or everything again after a preemption. Sequences that want one token come
first, then chunks of the others fill the token budget, oldest first; a chunk may end anywhere. When
pages run out the youngest sequence gives back its own and computes them again later. The oldest is
therefore never stopped, and since a full context fits into the pool, every sequence ends.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from batchmla.core import Completion, FinishReason, Prompt
from batchmla.engine.forecast import Forecast
from batchmla.engine.group import Chunk, Group, Limits
from batchmla.engine.lengths import LengthEstimator
from batchmla.engine.pace import Pace
from batchmla.engine.relief import Relief
from batchmla.engine.sequence import Sequence, failed
from batchmla.engine.source import ForesightSource
from batchmla.kv.pages import PageTable

FORECAST_STEPS = 8  # that a forecast is good for: a part of a page


@dataclass(slots=True)
class _Room:
    """What is left of a step for one attention group."""

    group: Group
    chunks: list[Chunk]
    left_tokens: int


class Scheduler:
    """One queue, and admission to the attention groups, each with a pool of pages and a step of its
    own. A sequence goes to one of them: where the pages it adds leave the least in use, so that a
    prefix found in a group counts for it, but does not draw all sequences there.
    """

    def __init__(self, tables: Items[PageTable], limits: Limits, pace: Pace | None = None) -> None:
        """A page table for each group; `limits` are those of every group. Without a `pace` prompts
        take all that a step has left.
        """
        for pages in tables:
            pool_tokens = pages.num_pages * pages.page_tokens
            assert limits.max_model_len <= pool_tokens, f"{limits} in {pool_tokens} tokens"
        self.limits = limits
        self.groups = tuple(Group(pages, limits, index) for index, pages in enumerate(tables))
        self.lengths = LengthEstimator(min(512, limits.max_model_len))
        self.pace = pace
        self.relief = Relief(limits)
        self.is_short = False  # a sequence had no page to grow into, and none was taken
        self.preemptions = 0
        self.admitted_prompt_tokens = 0
        self.admitted_cached_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._preempted: deque[Sequence] = deque()  # oldest first
        self._arrivals = 0
        self._steps = 0
        self._forecasts: dict[int, tuple[Forecast, int]] = {}  # by group, with the step it is of

    @property
    def num_running(self) -> int:
        return sum(len(group.running) for group in self.groups)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def is_idle(self) -> bool:
        return self.num_running + self.num_waiting == 0

    @property
    def appetite(self) -> int:
        """Prompts worth adding now: a short queue, and what could be admitted as long as pages
        last.
        """
        open_groups = [] if self._preempted else [each for each in self.groups if not each.is_full]
        most = self.relief.most_seqs
        places = sum(max(0, most - len(group.running)) for group in open_groups)
        spare = max(2, self.limits.max_num_seqs * len(self.groups) // 8)
        return max(0, places + spare - len(self._waiting))

    def look_ahead(self, source: object) -> None:
        """Lets the pages that the source's prompts will want outlast others, if it can tell."""
        future = None
        if self.limits.prefix_caching and isinstance(source, ForesightSource):
            future = source.foresee(self.groups[0].pages.page_tokens)
        for group in self.groups:
            group.pages.future = future

    def add(self, prompt: Prompt) -> Completion | None:
        """Queues a prompt; a completion if it can never run or has nothing to generate."""
        limit = self.limits.max_model_len
        length = len(prompt.token_ids)
        if length == 0:
            return failed(prompt, "the prompt has no tokens; give the row some text")
        if length + 1 > limit:
            return failed(
                prompt,
                f"the prompt has {length} tokens, which with one more to generate exceeds "
                f"model.max_model_len = {limit}; shorten it or set prompt.too_long",
            )
        sequence = Sequence(prompt, arrival=self._arrivals, max_model_len=limit)
        if sequence.max_total <= length:
            return sequence.completion(FinishReason.LENGTH)
        self._arrivals += 1
        self._waiting.append(sequence)
        return None

    def schedule(self, *, may_preempt: bool = True) -> list[Chunk]:
        """The chunks of the next step, group by group; empty only when nothing is running or
        waiting, or when not `may_preempt`: sequences without a page to grow into then wait."""
        self._steps += 1
        rooms = [self._go_on(group, may_preempt) for group in self.groups]
        self._admit(rooms)
        if self.pace is not None:
            self.pace.note(was_short=any(self._is_short_of_tokens(room) for room in rooms))
        if len(rooms) == 1:
            return rooms[0].chunks
        return [chunk for room in rooms for chunk in room.chunks]

    def _go_on(self, group: Group, may_preempt: bool) -> _Room:
        """With the sequences that run already."""
        budget_tokens = self.relief.most_tokens
        chunks: list[Chunk] = []
        place = 0
        while place < len(group.running) and len(chunks) < budget_tokens:
            sequence = group.running[place]
            if sequence.wanted == 1:
                if not may_preempt and not group.grow(sequence):
                    self.is_short = True
                    break
                if not self._make_room(group, sequence):
                    break
                chunks.append(Chunk(sequence, sequence.computed, 1, True))
            place += 1
        context_tokens = sum(chunk.start + 1 for chunk in chunks)
        return self._with_prompts(group, chunks, group.running, len(chunks), context_tokens)

    def _with_prompts(
        self,
        group: Group,
        chunks: list[Chunk],
        running: Iterable[Sequence],
        decodes: int,
        context_tokens: int,
    ) -> _Room:
        """A step with chunks of those that want more than a token, beside `decodes` that want one
        and have so much context together.
        """
        left_tokens = self.relief.most_tokens - decodes
        left_tokens = min(left_tokens, self._prompt_tokens(decodes, context_tokens))
        room = _Room(group, chunks, left_tokens)
        for sequence in running:
            if sequence.wanted > 1 and room.left_tokens > 0:
                self._cut(sequence, room)
        return room

    def computed(self, chunks: Iterable[Chunk]) -> None:
        """Notes that the forward pass over `chunks` is done."""
        for chunk in chunks:
            self.groups[chunk.sequence.group].computed(chunk)

    def step_down(self, chunks: Items[Chunk], *, has_state: bool) -> bool:
        """After a step that ran out of memory: the next ones are half as large, and the youngest
        sequences wait. False when one sequence with the smallest chunk was too much.

        `has_state`: lanes hold what a step changes, so that every sequence has to begin again.
        """
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if not self.relief.step_down(len(chunks), num_tokens, self.num_running):
            return False
        staying = 0 if has_state else self.relief.most_seqs
        for group in self.groups:
            for sequence in reversed(group.running[staying:]):
                self._preempt(sequence)
            if has_state:
                group.lanes.forget_all()
            group.is_full = False
        return True

    def finish(self, sequence: Sequence) -> None:
        """Frees a finished sequence; whole pages of its prompt stay for later prompts."""
        self.lengths.observe(sequence)
        sequence.is_over = True
        group = self.groups[sequence.group]
        group.drop(sequence, keep_pages=sequence.prompt_tokens // group.pages.page_tokens)
        group.is_full = False

    def fail(self, sequence: Sequence) -> list[int]:
        """Frees a sequence whose rows are bad; no page of it is found again. Returns the blank
        pages.
        """
        sequence.is_over = True
        group = self.groups[sequence.group]
        group.pages.withdraw(sequence.pages.view.tolist())
        group.lanes.forget(sequence.hashes)
        group.is_full = False
        return group.drop(sequence, keep_pages=0)

    def abort(self) -> None:
        """Forgets every sequence."""
        for group in self.groups:
            for sequence in list(group.running):
                group.drop(sequence, keep_pages=sequence.published)
            group.is_full = False
        self._waiting.clear()
        self._preempted.clear()
        self._forecasts.clear()

    def _prompt_tokens(self, decodes: int, context_tokens: int) -> int:
        """What prompts may take of a step with so many completions."""
        if self.pace is None:
            return self.relief.most_tokens
        return self.pace.prompt_tokens(decodes, context_tokens)

    def _cut(self, sequence: Sequence, room: _Room) -> None:
        count = room.group.up_to_border(sequence, min(sequence.wanted, room.left_tokens))
        room.chunks.append(Chunk(sequence, sequence.computed, count, count == sequence.wanted))
        room.left_tokens -= count

    def _make_room(self, group: Group, sequence: Sequence) -> bool:
        """Grows the sequence by preempting younger ones; False when it was the youngest and went
        itself.
        """
        while not group.grow(sequence):
            youngest = group.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._forecasts.pop(sequence.group, None)
        self.groups[sequence.group].drop(sequence, keep_pages=sequence.published)
        place = 0
        while place < len(self._preempted) and self._preempted[place].arrival < sequence.arrival:
            place += 1
        self._preempted.insert(place, sequence)

    def _admit(self, rooms: list[_Room]) -> None:
        """Preempted sequences first, then waiting ones in order, while tokens, places and pages
        last.
        """
        for queue in (self._preempted, self._waiting):
            for sequence in list(queue):
                rooms = [room for room in rooms if self._is_open(room)]
                if not rooms:
                    return
                for room, hits in _by_load(sequence, rooms):
                    if room.group.waits_for_prefix(sequence, len(hits)):
                        break
                    if self._fits(sequence, hits, room):
                        queue.remove(sequence)
                        self._enter(sequence, hits, room)
                        break
                    room.group.is_full = True

    def _is_short_of_tokens(self, room: _Room) -> bool:
        has_place = len(room.group.running) < self.relief.most_seqs and not room.group.is_full
        return room.left_tokens <= 0 and has_place and self.num_waiting > 0

    def _is_open(self, room: _Room) -> bool:
        has_place = len(room.group.running) < self.relief.most_seqs
        return room.left_tokens > 0 and has_place and not room.group.is_full

    def _forecast(self, group: Group) -> Forecast:
        """A new one."""
        every = (*group.running, *self._preempted, *self._waiting)
        return Forecast(
            group.running,
            self.lengths,
            used_pages=group.pages.used_pages,
            page_tokens=group.pages.page_tokens,
            most_tokens=max(each.max_total - each.num_tokens for each in every),
        )

    def _forecasts_for(self, sequence: Sequence, group: Group) -> Iterator[Forecast]:
        """The last one while it is good, which counts some that have ended; then a new one."""
        kept, step = self._forecasts.get(group.index, (None, 0))
        if kept is not None and self._steps - step < FORECAST_STEPS:
            if sequence.max_total - sequence.num_tokens <= kept.most_tokens:
                yield kept
            if step == self._steps:
                return
        made = self._forecast(group)
        self._forecasts[group.index] = made, self._steps
        yield made

    def _fits(self, sequence: Sequence, hits: list[int], room: _Room) -> bool:
        group, pages = room.group, room.group.pages
        new_pages = _new_pages(sequence, hits, pages)
        reused_idle = pages.idle_among(hits)
        if new_pages + reused_idle > pages.available_pages:
            return False
        for forecast in self._forecasts_for(sequence, group):
            addition = forecast.addition(sequence, new_pages, reused_idle)
            if not group.running or forecast.peak_pages(addition) <= pages.num_pages:
                forecast.add(addition)
                return True
        return False

    def _enter(self, sequence: Sequence, hits: list[int], room: _Room) -> None:
        is_first = sequence.cached_tokens is None
        forecast, _ = self._forecasts[room.group.index]
        room.group.admit(sequence, hits, forecast.growth_pages(sequence))
        if is_first:
            self.admitted_prompt_tokens += sequence.prompt_tokens
            self.admitted_cached_tokens += sequence.cached_tokens or 0
        self._cut(sequence, room)


def _new_pages(sequence: Sequence, hits: list[int], pages: PageTable) -> int:
    """That the sequence takes besides those it finds."""
    return -(-sequence.num_tokens // pages.page_tokens) - len(hits)


def _by_load(sequence: Sequence, rooms: list[_Room]) -> list[tuple[_Room, list[int]]]:
    """The groups that a sequence may join, with what it finds there: first the one that will have
    the fewest pages in use.
    """
    found = [(room, room.group.hits(sequence)) for room in rooms]
    if len(found) > 1:
        found.sort(key=lambda each: _load(sequence, *each))
    return found


def _load(sequence: Sequence, room: _Room, hits: list[int]) -> tuple[int, int]:
    """Pages in use with the sequence, then sequences."""
    pages = room.group.pages
    idle = pages.idle_among(hits)
    return pages.used_pages + idle + _new_pages(sequence, hits, pages), len(room.group.running)
