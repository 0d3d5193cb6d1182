"""Who holds which page of the KV pool: allocate, share by content, free. Host only, no tensors.
A page is in one of three states: held (one or more references), idle (no reference, but published
under the hash of its content, so that a later sequence can take it again) or blank (free, content
unknown). Idle pages are turned blank only when blank ones run out: least recently used first, but
last those of which it is known that they are wanted again, the ones wanted latest before others.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

PageHash = bytes


class Future(Protocol):
    """What is known of the prompts to come."""

    def next_use(self, name: PageHash) -> int | None:
        """When the page is wanted next: the lower the sooner. None: not that is known."""
        ...


def page_hash(parent: PageHash, token_ids: npt.NDArray[np.int32]) -> PageHash:
    """blake2b-128 of the previous page's hash and this page's ids: it names the whole prefix."""
    return blake2b(
        parent + np.ascontiguousarray(token_ids, np.dtype("<i4")).tobytes(), digest_size=16
    ).digest()


def chain_hashes(
    known: list[PageHash], token_ids: npt.NDArray[np.int32], page_tokens: int, num_tokens: int
) -> None:
    """Extends `known`, the hashes of the leading pages, to all full pages of the first `num_tokens`
    ids.
    """
    for index in range(len(known), num_tokens // page_tokens):
        parent = known[-1] if known else b""
        known.append(page_hash(parent, token_ids[index * page_tokens : (index + 1) * page_tokens]))


class PageTable:
    """References, hashes and free pages of one pool of `num_pages` pages."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        assert num_pages > 0 and page_tokens > 0, f"{num_pages} pages of {page_tokens} tokens"
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.refs = [0] * num_pages
        self._hash_of: list[PageHash | None] = [None] * num_pages
        self._page_of: dict[PageHash, int] = {}
        self.future: Future | None = None
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._is_blank_P = np.ones(num_pages, bool)
        self._num_blank = num_pages
        self._cursor = 0

    @property
    def available_pages(self) -> int:
        """Pages an allocation can get: blank ones and those only kept for reuse."""
        return self._num_blank + len(self._idle)

    @property
    def used_pages(self) -> int:
        """Pages with a reference, each counted once however many share it."""
        return self.num_pages - self.available_pages

    def is_published(self, page: int) -> bool:
        """Whether a later sequence could find this page by its content."""
        return self._hash_of[page] is not None

    def match(self, hashes: Sequence[PageHash]) -> list[int]:
        """The published pages of the longest known prefix; takes no reference."""
        pages: list[int] = []
        for name in hashes:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def idle_among(self, pages: Iterable[int]) -> int:
        """How many of `pages` no one holds: taking them lowers `available_pages` by that much."""
        return sum(self.refs[page] == 0 for page in pages)

    def acquire(self, pages: Iterable[int]) -> None:
        """One more reference on pages found by `match`."""
        for page in pages:
            assert self._hash_of[page] is not None, f"page {page} is not published"
            if self.refs[page] == 0:
                del self._idle[page]
            self.refs[page] += 1

    def allocate(
        self, count: int, *, after: int | None = None, room_pages: int | None = None
    ) -> list[int]:
        """`count` pages with one reference each, consecutive where possible.

        `after` is the sequence's last page: the pages following it are tried first. Otherwise a new
        run starts where `room_pages` (the sequence's expected growth) fit, so that neighbours do
        not grow into each other.
        """
        assert count <= self.available_pages, f"{count} of {self.available_pages} pages"
        if count > self._num_blank:
            self._evict(count - self._num_blank)
        pages: list[int] = []
        if after is not None:
            page = after + 1
            while len(pages) < count and page < self.num_pages and self._is_blank_P[page]:
                pages.append(page)
                page += 1
            self._take(pages)
        while len(pages) < count:
            wanted = count - len(pages)
            run = self._find_run(wanted, max(wanted, room_pages or 0))
            self._take(run)
            pages.extend(run)
        return pages

    def publish(self, page: int, name: PageHash) -> None:
        """Makes a full, computed page findable; of two with the same content the first stays."""
        assert self.refs[page] > 0, f"page {page} is published by no holder"
        if name not in self._page_of and self._hash_of[page] is None:
            self._page_of[name] = page
            self._hash_of[page] = name

    def release(self, pages: Sequence[int], *, keep: int) -> list[int]:
        """Drops one reference each; of those then free, the first `keep` stay findable if
        published.

        Returns the pages that became blank. Early pages of a prefix are evicted after later ones.
        """
        blank: list[int] = []
        for index in range(len(pages) - 1, -1, -1):
            page = pages[index]
            assert self.refs[page] > 0, f"page {page} is released without a reference"
            self.refs[page] -= 1
            if self.refs[page] > 0:
                continue
            if index < keep and self._hash_of[page] is not None:
                self._idle[page] = None
            else:
                self._withdraw(page)
                blank.append(page)
        self._is_blank_P[blank] = True
        self._num_blank += len(blank)
        return blank

    def withdraw(self, pages: Iterable[int]) -> None:
        """Makes pages unfindable, because their content turned out to be bad; references stay."""
        for page in pages:
            assert self.refs[page] > 0, f"page {page} is withdrawn without a reference"
            self._withdraw(page)

    def _withdraw(self, page: int) -> None:
        name = self._hash_of[page]
        if name is not None:
            del self._page_of[name]
            self._hash_of[page] = None

    def _evict(self, count: int) -> None:
        chosen = self._unwanted(count)
        if len(chosen) < count:
            chosen += self._wanted_last(count - len(chosen), chosen)
        for page in chosen:
            del self._idle[page]
            self._withdraw(page)
            self._is_blank_P[page] = True
        self._num_blank += count

    def _unwanted(self, count: int) -> list[int]:
        """Up to `count` idle pages that nobody is known to want, oldest first."""
        if self.future is None:
            return list(islice(self._idle, count))
        chosen: list[int] = []
        wanted: list[int] = []
        for page in self._idle:
            if len(chosen) == count:
                break
            (chosen if self._next_use(page) is None else wanted).append(page)
        for page in wanted:  # not looked at again before the others
            self._idle.move_to_end(page)
        return chosen

    def _wanted_last(self, count: int, besides: list[int]) -> list[int]:
        """The idle pages, not `besides`, whose next use is furthest away; the oldest of several."""
        chosen = set(besides)
        others = (page for page in self._idle if page not in chosen)
        return heapq.nlargest(count, others, key=lambda page: self._next_use(page) or 0)

    def _next_use(self, page: int) -> int | None:
        name = self._hash_of[page]
        return None if self.future is None or name is None else self.future.next_use(name)

    def _take(self, pages: list[int]) -> None:
        for page in pages:
            self.refs[page] = 1
        self._is_blank_P[pages] = False
        self._num_blank -= len(pages)

    def _find_run(self, wanted: int, room: int) -> list[int]:
        """Up to `wanted` consecutive blank pages: from the first run of `room` after the cursor,
        else the longest.
        """
        blank = np.flatnonzero(self._is_blank_P)
        cuts = np.flatnonzero(np.diff(blank) > 1) + 1
        split = int(np.searchsorted(blank, self._cursor))
        if 0 < split < len(blank):
            cuts = np.union1d(cuts, [split])
        firsts = np.concatenate(([0], cuts))
        lengths = np.diff(np.concatenate((firsts, [len(blank)])))
        starts = blank[firsts]
        fits = np.flatnonzero(lengths >= room)
        if len(fits):
            ahead = fits[starts[fits] >= self._cursor]
            chosen = int(ahead[0] if len(ahead) else fits[0])
        else:
            chosen = int(np.argmax(lengths))
        start, length = int(starts[chosen]), int(lengths[chosen])
        self._cursor = (start + min(room, length)) % self.num_pages
        return list(range(start, start + min(wanted, length)))
