"""A completion split into reasoning and content.

The state starts from the prompt: it is open when the prompt ends inside the thinking markers. Then
the first end marker closes it; whatever follows is content, further markers included. When the
prompt is not open, the first start marker that the model writes opens it; text before that marker
is kept as the beginning of the content. A start marker that an open prompt's completion begins with
is a marker, too. Text is never stripped.

Markers that are control tokens are found by id, so text that only spells them does not count. A
job's own markers may be plain text; they are found in the completion's bytes, since a tokenizer may
join their ends to the neighbouring text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

import numpy as np

from batchmla.core import Completion, FinishReason, TokenIds
from batchmla.text.decode import as_text
from batchmla.text.formats.format import Format
from batchmla.text.tokenizer import Tokenizer


class ReasoningState(StrEnum):
    """How the reasoning of a row ended."""

    CLOSED = "closed"  # by the model
    BUDGET = "budget"  # by the budget
    LOOP = "loop"  # by the loop guard
    LENGTH = "length"  # max_tokens fell inside it
    UNCLOSED = "unclosed"  # a stop came inside it
    NONE = "none"  # there was none


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The two texts of a row. Markers and forced tokens are in neither count."""

    reasoning: str | None
    content: str | None
    state: ReasoningState
    reasoning_tokens: int
    content_tokens: int
    is_lossy: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    """A marker in a completion: tokens [first, after) hold its bytes [start, end)."""

    first: int
    after: int
    start: int
    end: int


class Reasoner:
    """Splits completions of one model by one format's markers."""

    def __init__(self, tokenizer: Tokenizer, chat_format: Format) -> None:
        self._tokenizer = tokenizer
        self.format = chat_format
        self._start = (chat_format.start or "").encode()
        self._end = (chat_format.end or "").encode()
        self.start_ids = self._marker_ids(chat_format.start)
        self.end_ids = self._marker_ids(chat_format.end)

    @property
    def has_markers(self) -> bool:
        """Whether the format knows reasoning at all."""
        return self.format.start is not None

    @property
    def are_markers_tokens(self) -> bool:
        """Whether both markers are control tokens, which an engine can watch for and force."""
        return bool(self.start_ids and self.end_ids)

    def _marker_ids(self, marker: str | None) -> tuple[int, ...]:
        """The marker as control tokens alone, () for plain text."""
        if marker is None:
            return ()
        ids = self._tokenizer.encode(marker)
        return tuple(ids.tolist()) if self._tokenizer.is_control(ids).all() else ()

    def is_open(self, prompt_ids: TokenIds) -> bool:
        """Whether the prompt ends inside the reasoning.

        Marker tokens count wherever they stand, for row text cannot make them. Markers of plain
        text count only at the very end, white space aside.
        """
        if not self.has_markers:
            return False
        if self.are_markers_tokens:
            return _rfind(prompt_ids, self.start_ids) > _rfind(prompt_ids, self.end_ids)
        tail = b""
        for token_id in reversed(prompt_ids.tolist()):
            tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail.strip()) >= len(self._start.strip()):
                break
        return tail.rstrip().endswith(self._start.rstrip())

    def split(
        self, completion: Completion, *, is_open: bool, forced_ids: Sequence[int] = ()
    ) -> Answer:
        """The two halves of a completion.

        `is_open` is that of its prompt, `forced_ids` those of its budget: what the engine appended
        from `completion.forced_at` on.
        """
        if completion.finish_reason is FinishReason.ERROR:
            return _answer(None, None, ReasoningState.NONE, 0, 0)
        ids: list[int] = completion.token_ids.tolist()
        pieces = [self._tokenizer.token_bytes(token_id) for token_id in ids]
        if completion.trimmed_bytes:
            pieces[-1] = pieces[-1][: -completion.trimmed_bytes]
        data = b"".join(pieces)
        if not self.has_markers:
            return _answer(None, data, ReasoningState.NONE, 0, len(ids))
        edges = list(accumulate(map(len, pieces), initial=0))  # byte offset of every token

        opening = _Cut(0, 0, 0, 0)
        found = self._find(ids, data, edges, self.start_ids, self._start, opening)
        if found is not None and (found.start == 0 or not is_open):
            opening = found
        elif not is_open:
            return _answer(None, data, ReasoningState.NONE, 0, len(ids))
        before = data[: opening.start]
        if completion.forced_at is not None:
            made = self._split_forced(ids, data, edges, opening, completion.forced_at, forced_ids)
            is_looped = completion.has_looped and made.state is ReasoningState.BUDGET
            return replace(made, state=ReasoningState.LOOP) if is_looped else made
        closing = self._find(ids, data, edges, self.end_ids, self._end, opening)
        if closing is None:
            is_cut = completion.finish_reason is FinishReason.LENGTH
            state = ReasoningState.LENGTH if is_cut else ReasoningState.UNCLOSED
            inside = len(ids) - opening.after
            return _answer(data[opening.end :], before, state, inside, opening.first)
        return _answer(
            data[opening.end : closing.start],
            before,
            ReasoningState.CLOSED,
            closing.first - opening.after,
            opening.first + len(ids) - closing.after,
            data[closing.end :],
        )

    def _split_forced(
        self,
        ids: Sequence[int],
        data: bytes,
        edges: Sequence[int],
        opening: _Cut,
        forced_at: int,
        forced_ids: Sequence[int],
    ) -> Answer:
        after = min(forced_at + len(forced_ids), len(ids))
        is_whole = after - forced_at == len(forced_ids)
        message_end = min(forced_at + len(forced_ids) - len(self.end_ids), after)
        own = as_text(data[opening.end : edges[forced_at]])
        message = as_text(data[edges[forced_at] : edges[message_end]])
        before = as_text(data[: opening.start])
        rest = as_text(data[edges[after] :])
        return Answer(
            reasoning=own.text + message.text,
            content=before.text + rest.text,
            state=ReasoningState.BUDGET if is_whole else ReasoningState.LENGTH,
            reasoning_tokens=forced_at - opening.after,
            content_tokens=opening.first + len(ids) - after,
            is_lossy=any(part.is_lossy for part in (own, message, before, rest)),
        )

    def _find(
        self,
        ids: Sequence[int],
        data: bytes,
        edges: Sequence[int],
        marker_ids: Sequence[int],
        marker: bytes,
        behind: _Cut,
    ) -> _Cut | None:
        """The first such marker behind another."""
        if self.are_markers_tokens:
            first = _find(ids, marker_ids, behind.after)
            after = first + len(marker_ids)
            return None if first < 0 else _Cut(first, after, edges[first], edges[after])
        start = data.find(marker, behind.end)
        if start < 0:
            return None
        end = start + len(marker)
        first = max(behind.after, next(n for n in range(len(ids)) if edges[n + 1] > start))
        after = next(n for n in range(len(ids) + 1) if edges[n] >= end)
        return _Cut(first, max(first, after), start, end)


def _answer(
    reasoning: bytes | None,
    before: bytes | None,
    state: ReasoningState,
    reasoning_tokens: int,
    content_tokens: int,
    content: bytes = b"",
) -> Answer:
    """`before` and `content` are the content on either side of the reasoning."""
    parts = [as_text(data) for data in (reasoning, before, content) if data is not None]
    text = None if before is None else as_text(before).text + as_text(content).text
    return Answer(
        reasoning=None if reasoning is None else as_text(reasoning).text,
        content=text,
        state=state,
        reasoning_tokens=reasoning_tokens,
        content_tokens=content_tokens,
        is_lossy=any(part.is_lossy for part in parts),
    )


def _find(ids: Sequence[int], wanted: Sequence[int], at: int) -> int:
    size = len(wanted)
    for n in range(at, len(ids) - size + 1):
        if ids[n] == wanted[0] and tuple(ids[n : n + size]) == tuple(wanted):
            return n
    return -1


def _rfind(ids: TokenIds, wanted: Sequence[int]) -> int:
    for start in np.flatnonzero(ids == wanted[0])[::-1].tolist():
        if tuple(ids[start : start + len(wanted)].tolist()) == tuple(wanted):
            return int(start)
    return -1
