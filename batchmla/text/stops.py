"""Stop strings: where the leftmost of them begins in a text that arrives token by token.

The search is over the tokens' bytes, so it does not matter how the text is cut into tokens. A match
is certain once no stop string that began further left can still be completed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchmla.core import TextCut


@dataclass(frozen=True, slots=True)
class StopStrings:
    """A `StopRule`. The strings are not empty."""

    strings: tuple[bytes, ...]
    token_bytes: Callable[[int], bytes]

    @classmethod
    def of(cls, texts: Sequence[str], token_bytes: Callable[[int], bytes]) -> "StopStrings":
        """`token_bytes` are the bytes that an id stands for."""
        assert all(texts), "an empty stop string would end every text"
        return cls(tuple(text.encode() for text in texts), token_bytes)

    def watch(self) -> "StopSearch":
        """A search from the beginning of a text."""
        return StopSearch(self)


class StopSearch:
    """A `StopWatch`."""

    def __init__(self, rule: StopStrings) -> None:
        self._rule = rule
        self._data = bytearray()
        self._ends: list[int] = []  # of every token, in bytes
        self._found: int | None = None  # where the leftmost match so far begins

    def push(self, token_id: int) -> TextCut | None:
        """Notes a token; the cut as soon as the leftmost match is certain."""
        old = len(self._data)
        self._data += self._rule.token_bytes(token_id)
        self._ends.append(len(self._data))
        for stop in self._rule.strings:
            last = len(self._data) if self._found is None else self._found - 1 + len(stop)
            start = self._data.find(stop, max(0, old - len(stop) + 1), last)
            if start >= 0:
                self._found = start
        if self._found is None or self._may_begin_before(self._found):
            return None
        return self.finish()

    def finish(self) -> TextCut | None:
        """The cut of the text as it stands."""
        if self._found is None:
            return None
        starts = [0, *self._ends]
        num_tokens = next(n for n in range(len(starts)) if starts[n] >= self._found)
        return TextCut(num_tokens, starts[num_tokens] - self._found)

    def _may_begin_before(self, found: int) -> bool:
        """Whether the text ends in the beginning of a stop string that starts left of `found`."""
        size = len(self._data)
        return any(
            stop.startswith(self._data[start:])
            for stop in self._rule.strings
            for start in range(max(0, size - len(stop) + 1), found)
        )
