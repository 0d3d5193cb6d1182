"""Text that remembers which of its parts came from a row. It knows nothing of tokens or templates.

The mark is what keeps a row's text from becoming a control token: only text outside all spans may.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Span = tuple[int, int]  # [start, end) in characters


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text and the sorted, disjoint, non-empty spans of it that are row text."""

    text: str
    spans: tuple[Span, ...] = ()

    @classmethod
    def of_row(cls, text: str) -> "MarkedText":
        """Text that is row text from end to end."""
        return cls(text, ((0, len(text)),) if text else ())

    @classmethod
    def join(cls, parts: Iterable["MarkedText | str"]) -> "MarkedText":
        """The parts one after the other; plain strings carry no mark."""
        texts: list[str] = []
        spans: list[Span] = []
        offset = 0
        for part in parts:
            if isinstance(part, MarkedText):
                text = part.text
                spans += [(start + offset, end + offset) for start, end in part.spans]
            else:
                text = part
            texts.append(text)
            offset += len(text)
        return cls("".join(texts), tuple(spans))

    def cut(self, start: int, end: int) -> "MarkedText":
        """The characters [start, end) with their marks."""
        return MarkedText(self.text[start:end], cut_spans(self.spans, start, end))

    def trimmed(self, *, left: bool, right: bool) -> "MarkedText":
        """Without white space at the named ends, as a template's `trim` leaves it."""
        start = len(self.text) - len(self.text.lstrip()) if left else 0
        end = len(self.text.rstrip()) if right else len(self.text)
        if start == 0 and end == len(self.text):
            return self
        return self.cut(start, max(start, end))

    def also(self, spans: Iterable[Span]) -> "MarkedText":
        """With these characters marked, too."""
        merged: list[Span] = []
        for start, end in sorted([*self.spans, *spans]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return MarkedText(self.text, tuple(merged))

    def unmarked(self) -> list[str]:
        """The texts of the maximal runs that are not row text."""
        return [self.text[start:end] for start, end, is_row in self.runs() if not is_row]

    def runs(self) -> Iterator[tuple[int, int, bool]]:
        """(start, end, is row text) of every maximal run, in order, together the whole text."""
        at = 0
        for start, end in self.spans:
            if at < start:
                yield at, start, False
            yield start, end, True
            at = end
        if at < len(self.text):
            yield at, len(self.text), False


def cut_spans(spans: Iterable[Span], start: int, end: int) -> tuple[Span, ...]:
    """What `spans` become when only [start, end) is kept, counted from `start`."""
    return tuple(
        (max(a, start) - start, min(b, end) - start) for a, b in spans if a < end and b > start
    )
