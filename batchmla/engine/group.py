"""The sequences that share one page table: pages and lanes on entering, growing and leaving, and
what they can share. Host only; decides nothing about who runs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchmla.engine.sequence import GrowingIds, Sequence
from batchmla.kv.lanes import Lanes
from batchmla.kv.pages import PageHash, PageTable, chain_hashes


class Chunk(NamedTuple):
    """`num_tokens` tokens of `sequence` from position `start` on.

    `samples`: the chunk reaches the last known token, so that the next one can be drawn.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a step and a sequence.

    `prefix_caching` shares pages by content; `share_generated` lets pages with generated tokens in
    them be found again too (exact mode switches that off). With `snapshot_lanes` prefixes are found
    only where the lane of a sequence was kept; without, at every page.
    """

    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    prefix_caching: bool = True
    share_generated: bool = True
    snapshot_lanes: int = 0

    @property
    def num_lanes(self) -> int:
        """Of running sequences and of snapshots."""
        return self.max_num_seqs + self.snapshot_lanes


class Group:
    """The sequences that share one page table, oldest first."""

    def __init__(self, pages: PageTable, limits: Limits, index: int = 0) -> None:
        self.pages = pages
        self.limits = limits
        self.index = index
        self.is_full = False  # nothing was freed since an admission failed for lack of pages
        self.running: list[Sequence] = []
        self.lanes = Lanes(limits.max_num_seqs, limits.snapshot_lanes)
        self._computing: dict[
            PageHash, Sequence
        ] = {}  # prompt pages that a running sequence will publish

    def shareable_tokens(self, sequence: Sequence) -> int:
        """Leading tokens whose full pages may be found by their content."""
        if not self.limits.prefix_caching:
            return 0
        if not self.limits.share_generated:
            return sequence.prompt_tokens
        return sequence.num_tokens - sequence.is_ahead

    def hits(self, sequence: Sequence) -> list[int]:
        """Published pages of the sequence's prefix; at least one token is left to compute, and all
        are where the prompt's rows are wanted for their logits.
        """
        page_tokens = self.pages.page_tokens
        known = self.shareable_tokens(sequence)
        chain_hashes(sequence.hashes, sequence.tokens.view, page_tokens, known)
        if sequence.scores_prompt:
            return []
        usable = min(known, sequence.num_tokens - 1) // page_tokens
        matched = self.pages.match(sequence.hashes[:usable])
        if not self.lanes.keeps_snapshots or not matched:
            return matched
        kept = self.lanes.longest(sequence.hashes[: len(matched)])
        if kept < len(matched):
            self.lanes.want(sequence.hashes[len(matched) - 1])
        return matched[:kept]

    def waits_for_prefix(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether a running sequence is about to compute the next page of the same prefix."""
        usable = (sequence.num_tokens - 1) // self.pages.page_tokens
        if self.lanes.keeps_snapshots:
            return self._waits_for_border(sequence, num_hits, usable)
        return (
            num_hits < min(usable, len(sequence.hashes))
            and not sequence.scores_prompt
            and sequence.hashes[num_hits] in self._computing
        )

    def _waits_for_border(self, sequence: Sequence, num_hits: int, usable: int) -> bool:
        """Whether a running sequence is about to pass where the two part; it is kept then."""
        names = sequence.hashes[:usable]
        end = len(self.pages.match(names))
        while end < len(names) and names[end] in self._computing:
            end += 1
        if end <= num_hits or sequence.scores_prompt:
            return False
        is_coming = any(
            other.computed < end * self.pages.page_tokens
            and other.hashes[end - 1 : end] == names[end - 1 : end]
            for other in self.running
        )
        if is_coming:
            self.lanes.want(names[end - 1])
        return is_coming

    def up_to_border(self, sequence: Sequence, num_tokens: int) -> int:
        """The next `num_tokens`, or less where a border on the way is to be kept."""
        if not self.lanes.keeps_snapshots:
            return num_tokens
        page_tokens, end = self.pages.page_tokens, sequence.computed + num_tokens
        for index in range(sequence.computed // page_tokens, end // page_tokens):
            if index < len(sequence.hashes) and self.lanes.is_wanted(sequence.hashes[index]):
                return (index + 1) * page_tokens - sequence.computed
        return num_tokens

    def admit(self, sequence: Sequence, hits: list[int], room_pages: int) -> None:
        """Gives the sequence pages for all its tokens and puts it among the running by age."""
        sequence.group = self.index
        self.pages.acquire(hits)
        needed = self._pages_for(sequence.num_tokens) - len(hits)
        fresh = self.pages.allocate(
            needed, after=hits[-1] if hits else None, room_pages=needed + room_pages
        )
        sequence.pages.extend(hits + fresh)
        sequence.lane = self.lanes.take()
        if hits and self.lanes.keeps_snapshots:
            self.lanes.restore(sequence.hashes[len(hits) - 1], sequence.lane)
        sequence.computed = len(hits) * self.pages.page_tokens
        sequence.shared_pages = sequence.published = len(hits)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        for name in sequence.hashes[len(hits) :]:
            self._computing.setdefault(name, sequence)
        place = len(self.running)
        while place > 0 and self.running[place - 1].arrival > sequence.arrival:
            place -= 1
        self.running.insert(place, sequence)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the sequence's pages hold one more token."""
        return sequence.num_tokens < len(sequence.pages) * self.pages.page_tokens

    def grow(self, sequence: Sequence) -> bool:
        """One more page if the next token needs it; False when none is left."""
        if sequence.num_tokens <= len(sequence.pages) * self.pages.page_tokens:
            return True
        if self.pages.available_pages == 0:
            return False
        last = int(sequence.pages.view[-1])
        sequence.pages.extend(self.pages.allocate(1, after=last))
        return True

    def computed(self, chunk: Chunk) -> None:
        """Notes that the chunk's rows are in the cache and publishes the pages they filled."""
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.num_tokens
        page_tokens = self.pages.page_tokens
        num_pages, rest = divmod(sequence.computed, page_tokens)
        if rest == 0 and num_pages <= len(sequence.hashes) and self.lanes.keeps_snapshots:
            self.lanes.keep(sequence.hashes[num_pages - 1], sequence.lane)
        if sequence.computed < (sequence.published + 1) * page_tokens:
            return
        full = min(sequence.computed, self.shareable_tokens(sequence)) // page_tokens
        if full <= sequence.published:
            return
        chain_hashes(sequence.hashes, sequence.tokens.view, page_tokens, full * page_tokens)
        for index in range(sequence.published, full):
            name = sequence.hashes[index]
            self.pages.publish(int(sequence.pages.view[index]), name)
            if self._computing.get(name) is sequence:
                del self._computing[name]
        sequence.published = full

    def drop(self, sequence: Sequence, *, keep_pages: int) -> list[int]:
        """Takes the sequence off the pool; its first `keep_pages` pages stay findable. Blank pages
        come back.
        """
        self.running.remove(sequence)
        self.lanes.give(sequence.lane)
        for name in sequence.hashes[sequence.published :]:
            if self._computing.get(name) is sequence:
                del self._computing[name]
        blank = self.pages.release(sequence.pages.view.tolist(), keep=keep_pages)
        sequence.pages = GrowingIds((), np.int64)
        sequence.computed = sequence.published = sequence.shared_pages = 0
        return blank

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pages.page_tokens)
