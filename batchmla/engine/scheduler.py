"""Who gets how many tokens of the next forward pass. Host only; knows no tensors and no model.
There are no phases: a sequence wants `len(tokens) - computed` tokens, whether they are its prompt,
one generated token, or everything again after a preemption. Sequences that want one token come
first, then chunks of the others fill the token budget, oldest first; a chunk may end anywhere. When
pages run out the youngest sequence gives back its own and computes them again later. The oldest is
therefore never stopped, and since a full context fits into the pool, every sequence ends.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items

from batchmla.core import Completion, FinishReason, Prompt
from batchmla.engine.forecast import Forecast
from batchmla.engine.group import Chunk, Group, Limits
from batchmla.engine.lengths import LengthEstimator
from batchmla.engine.pace import Pace
from batchmla.engine.relief import Relief
from batchmla.engine.sequence import Sequence, failed
from batchmla.engine.source import ForesightSource
from batchmla.kv.pages import PageTable


class Scheduler:
    """Queues and admission over one attention group."""

    def __init__(self, pages: PageTable, limits: Limits) -> None:
        pool_tokens = pages.num_pages * pages.page_tokens
        assert limits.max_model_len <= pool_tokens, f"{limits} in {pool_tokens} tokens"
        self.limits = limits
        self.group = Group(pages, limits)
        self.lengths = LengthEstimator(min(512, limits.max_model_len))
        self.pace: Pace | None = None  # None: prompts take what a step has left
        self.relief = Relief(limits)
        self.preemptions = 0
        self.admitted_prompt_tokens = 0
        self.admitted_cached_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._preempted: deque[Sequence] = deque()  # oldest first
        self._arrivals = 0
        self._is_full = False  # nothing was freed since an admission failed for lack of pages

    @property
    def num_running(self) -> int:
        return len(self.group.running)

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
        is_open = not self._is_full and not self._preempted
        places = max(0, self.relief.most_seqs - self.num_running) if is_open else 0
        return max(0, places + max(2, self.limits.max_num_seqs // 8) - len(self._waiting))

    def look_ahead(self, source: object) -> None:
        """Lets the pages that the source's prompts will want outlast others, if it can tell."""
        pages = self.group.pages
        pages.future = None
        if self.limits.prefix_caching and isinstance(source, ForesightSource):
            pages.future = source.foresee(pages.page_tokens)

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

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty only when nothing is running or waiting."""
        budget_tokens = self.relief.most_tokens
        chunks: list[Chunk] = []
        place = 0
        while place < len(self.group.running) and len(chunks) < budget_tokens:
            sequence = self.group.running[place]
            if sequence.wanted == 1:
                if not self._make_room(sequence):
                    break
                chunks.append(Chunk(sequence, sequence.computed, 1, True))
            place += 1
        left = min(budget_tokens - len(chunks), self._prompt_tokens(chunks))
        for sequence in self.group.running:
            if sequence.wanted > 1 and left > 0:
                left -= self._cut(sequence, left, chunks)
        if left > 0:
            self._admit(left, chunks)
        return chunks

    def computed(self, chunks: Iterable[Chunk]) -> None:
        """Notes that the forward pass over `chunks` is done."""
        for chunk in chunks:
            self.group.computed(chunk)

    def step_down(self, chunks: Items[Chunk], *, has_state: bool) -> bool:
        """After a step that ran out of memory: the next ones are half as large, and the youngest
        sequences wait. False when one sequence with the smallest chunk was too much.

        `has_state`: lanes hold what a step changes, so that every sequence has to begin again.
        """
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if not self.relief.step_down(len(chunks), num_tokens, self.num_running):
            return False
        staying = 0 if has_state else self.relief.most_seqs
        for sequence in reversed(self.group.running[staying:]):
            self._preempt(sequence)
        if has_state:
            self.group.lanes.forget_all()
        self._is_full = False
        return True

    def finish(self, sequence: Sequence) -> None:
        """Frees a finished sequence; whole pages of its prompt stay for later prompts."""
        self.lengths.observe(sequence)
        keep = sequence.prompt_tokens // self.group.pages.page_tokens
        self.group.drop(sequence, keep_pages=keep)
        self._is_full = False

    def fail(self, sequence: Sequence) -> list[int]:
        """Frees a sequence whose rows are bad; no page of it is found again. Returns the blank
        pages.
        """
        self.group.pages.withdraw(sequence.pages.view.tolist())
        self.group.lanes.forget(sequence.hashes)
        self._is_full = False
        return self.group.drop(sequence, keep_pages=0)

    def abort(self) -> None:
        """Forgets every sequence."""
        for sequence in list(self.group.running):
            self.group.drop(sequence, keep_pages=sequence.published)
        self._waiting.clear()
        self._preempted.clear()
        self._is_full = False

    def _prompt_tokens(self, decodes: list[Chunk]) -> int:
        """What prompts may take of a step with these completions."""
        if self.pace is None:
            return self.relief.most_tokens
        context = sum(chunk.start for chunk in decodes) + len(decodes)
        held = self.group.pages.used_pages * self.group.pages.page_tokens
        return self.pace.prompt_tokens(len(decodes), context, min(context, held))

    def _cut(self, sequence: Sequence, left: int, chunks: list[Chunk]) -> int:
        count = self.group.up_to_border(sequence, min(sequence.wanted, left))
        chunks.append(Chunk(sequence, sequence.computed, count, count == sequence.wanted))
        return count

    def _make_room(self, sequence: Sequence) -> bool:
        """Grows the sequence by preempting younger ones; False when it was the youngest and went
        itself.
        """
        while not self.group.grow(sequence):
            youngest = self.group.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.group.drop(sequence, keep_pages=sequence.published)
        place = 0
        while place < len(self._preempted) and self._preempted[place].arrival < sequence.arrival:
            place += 1
        self._preempted.insert(place, sequence)

    def _admit(self, left: int, chunks: list[Chunk]) -> None:
        """Preempted sequences first, then waiting ones in order, while tokens, places and pages
        last.
        """
        if self._is_full or not (self._preempted or self._waiting):
            return
        if self.num_running >= self.relief.most_seqs:
            return
        pages = self.group.pages
        forecast = Forecast(
            self.group.running,
            self.lengths,
            used_pages=pages.used_pages,
            page_tokens=pages.page_tokens,
            most_tokens=self._most_tokens(),
        )
        for queue in (self._preempted, self._waiting):
            for sequence in list(queue):
                if left == 0 or self.num_running >= self.relief.most_seqs:
                    return
                hits = self.group.hits(sequence)
                if self.group.waits_for_prefix(sequence, len(hits)):
                    continue
                if not self._fits(sequence, hits, forecast):
                    self._is_full = True
                    return
                queue.remove(sequence)
                self._enter(sequence, hits, forecast.growth_pages(sequence))
                left -= self._cut(sequence, left, chunks)

    def _most_tokens(self) -> int:
        """That any sequence may still generate."""
        every = (*self.group.running, *self._preempted, *self._waiting)
        return max(sequence.max_total - sequence.num_tokens for sequence in every)

    def _fits(self, sequence: Sequence, hits: list[int], forecast: Forecast) -> bool:
        pages = self.group.pages
        new_pages = -(-sequence.num_tokens // pages.page_tokens) - len(hits)
        reused_idle = pages.idle_among(hits)
        if new_pages + reused_idle > pages.available_pages:
            return False
        peak_pages = forecast.peak_pages(sequence, new_pages, reused_idle)
        if self.group.running and peak_pages > pages.num_pages:
            return False
        forecast.add(sequence, new_pages, reused_idle)
        return True

    def _enter(self, sequence: Sequence, hits: list[int], room_pages: int) -> None:
        is_first = sequence.cached_tokens is None
        self.group.admit(sequence, hits, room_pages)
        if is_first:
            self.admitted_prompt_tokens += sequence.prompt_tokens
            self.admitted_cached_tokens += sequence.cached_tokens or 0
