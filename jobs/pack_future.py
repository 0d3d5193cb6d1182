"""Which pages of prompts that have run are wanted again by prompts that wait, and when.

Only pages that several waiting prompts begin with count. Rows of one prefix lie side by side in the
packed order, so a page is known by the first and the last place at which it is wanted; between them
it is wanted at any time.
"""

from collections.abc import Sequence

from batchmla.core import Prompt
from batchmla.jobs.pack_order import Neighbours
from batchmla.kv.pages import PageHash, page_hash

QUEUE_ROWS = 64  # taken but perhaps not yet admitted

Span = tuple[int, int]  # first and last place


class PrefixFuture:
    """A `kv.pages.Future` over the packed order. Places count all prompts ever taken."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._spans: dict[PageHash, Span] = {}
        self._now = 0

    def next_use(self, name: PageHash) -> int | None:
        """The place in the order where the page is wanted next; None if it is not known to be."""
        span = self._spans.get(name)
        if span is None or span[1] + QUEUE_ROWS < self._now:
            return None
        return max(span[0], self._now)

    def take(self, count: int) -> None:
        """So many prompts more have been taken."""
        self._now += count

    def plan(self, prompts: Sequence[Prompt], neighbours: Neighbours, order: Sequence[int]) -> None:
        """The prompts that are taken next, in `order`; pages of earlier plans are forgotten once
        they are past.
        """
        self._spans = {
            name: span for name, span in self._spans.items() if span[1] + QUEUE_ROWS >= self._now
        }
        places = [0] * len(order)
        for place, position in enumerate(order):
            places[position] = self._now + place
        self._walk(prompts, neighbours, places)

    def _walk(
        self, prompts: Sequence[Prompt], neighbours: Neighbours, places: Sequence[int]
    ) -> None:
        """Goes through the prompts by their ids with the pages of the present one open."""
        open_pages: list[PageHash] = []
        open_spans: list[Span] = []
        for at, position in enumerate(neighbours.order):
            self._close(open_pages, open_spans, neighbours.common[at] // self._page_tokens)
            ids, place = prompts[position].token_ids, places[position]
            for index in range(len(open_pages), neighbours.best[at] // self._page_tokens):
                parent = open_pages[-1] if open_pages else b""
                start = index * self._page_tokens
                open_pages.append(page_hash(parent, ids[start : start + self._page_tokens]))
                open_spans.append((place, place))
            if open_spans:
                open_spans[-1] = _joined(open_spans[-1], (place, place))
        self._close(open_pages, open_spans, 0)

    def _close(self, open_pages: list[PageHash], open_spans: list[Span], keep: int) -> None:
        """Notes the deepest pages, whose prompts are all of the pages above, too."""
        while len(open_pages) > keep:
            name, span = open_pages.pop(), open_spans.pop()
            known = self._spans.get(name)
            self._spans[name] = span if known is None else _joined(known, span)
            if open_spans:
                open_spans[-1] = _joined(open_spans[-1], span)


def _joined(one: Span, other: Span) -> Span:
    return min(one[0], other[0]), max(one[1], other[1])
