"""A string that carries row-text marks through what a template does to it.

It behaves as `str` does, character for character. Concatenation, slicing, splitting, stripping and
replacing keep the marks exactly; any other method that yields text marks all of it and calls that
rough. Operations that C code performs behind its back (`str.join`, JSON encoding) drop the marks.
`origin.py` finds the marks of both kinds of results.

With a `watch` list it also notes every operation whose outcome depends on the characters, which is
how `chat.py` learns whether a template passes a message's text through unread.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

from batchmla.text.bounds import bounded_parts
from batchmla.text.marked import MarkedText, Span, cut_spans

Watch = list[str]


class TrackedText(str):
    """See the module's docstring. Made by `TrackedText.of`."""

    __slots__ = ("doubts", "is_rough", "spans", "watch")

    doubts: frozenset[str]  # control strings of the template that the marks may cover
    is_rough: bool  # whether the marks are not found yet
    spans: tuple[Span, ...]
    watch: Watch | None

    @classmethod
    def of(
        cls,
        marked: MarkedText,
        watch: Watch | None = None,
        *,
        doubts: frozenset[str] = frozenset(),
        is_rough: bool = False,
    ) -> "TrackedText":
        made = cls(marked.text)
        made.doubts = doubts
        made.is_rough = is_rough
        made.spans = marked.spans
        made.watch = watch
        return made

    @classmethod
    def concat(cls, parts: Iterable[Any]) -> str:
        """All parts as one text; plain when none of them is tracked."""
        texts = list(bounded_parts(parts))
        if not any(isinstance(text, cls) for text in texts):
            return "".join(texts)
        tracked = [text for text in texts if isinstance(text, cls)]
        joined = MarkedText.join(text.marked() if isinstance(text, cls) else text for text in texts)
        is_rough = any(text.is_rough for text in tracked)
        doubts = frozenset().union(*(text.doubts for text in tracked))
        return cls.of(joined, tracked[0].watch, doubts=doubts, is_rough=is_rough)

    def marked(self) -> MarkedText:
        """The plain text with its spans."""
        return MarkedText(_plain(self), self.spans)

    def _read(self, operation: str) -> None:
        if self.watch is not None:
            self.watch.append(operation)

    def _cut(self, start: int, end: int) -> "TrackedText":
        text = _plain(self)[start:end]
        marked = MarkedText(text, cut_spans(self.spans, start, end))
        return TrackedText.of(marked, self.watch, doubts=self.doubts, is_rough=self.is_rough)

    def _found(self, pieces: Iterable[str]) -> list["TrackedText"]:
        """`pieces`, which follow one another in this text, with their marks."""
        found: list[TrackedText] = []
        at = 0
        for piece in pieces:
            at = str.find(self, piece, at)
            found.append(self._cut(at, at + len(piece)))
            at += len(piece)
        return found

    # Operations that do not look at the characters.

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return TrackedText.concat((self, other))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return TrackedText.concat((other, self))

    def __bool__(self) -> bool:
        return str.__len__(self) > 0

    def strip(self, chars: str | None = None, /) -> str:
        if chars is not None:
            self._read("strip")
        rest = str.lstrip(self, chars)
        start = str.__len__(self) - len(rest)
        return self._cut(start, start + len(rest.rstrip(chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        if chars is not None:
            self._read("lstrip")
        return self._cut(str.__len__(self) - len(str.lstrip(self, chars)), str.__len__(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        if chars is not None:
            self._read("rstrip")
        return self._cut(0, len(str.rstrip(self, chars)))

    # Operations that do.

    def __getitem__(self, key: SupportsIndex | slice, /) -> str:
        self._read("[]")
        if isinstance(key, slice):
            start, stop, step = key.indices(str.__len__(self))
            if step == 1:
                return self._cut(start, max(start, stop))
            whole = TrackedText.concat(self._cut(at, at + 1) for at in range(start, stop, step))
            return whole if whole else self._cut(0, 0)
        index = operator.index(key)
        size = str.__len__(self)
        if not -size <= index < size:
            raise IndexError("string index out of range")
        return self._cut(index % size, index % size + 1)

    def __iter__(self) -> Iterator[str]:
        self._read("iteration")
        return (self._cut(at, at + 1) for at in range(str.__len__(self)))

    def __mul__(self, count: SupportsIndex, /) -> str:
        return TrackedText.concat([self] * count.__index__())

    def __rmul__(self, count: SupportsIndex, /) -> str:
        return self.__mul__(count)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        self._read("split")
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        self._read("rsplit")
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def _pieces(self, pieces: list[str], sep: str | None) -> list["TrackedText"]:
        if sep is None:
            return self._found(pieces)
        cut: list[TrackedText] = []
        at = 0
        for piece in pieces:
            cut.append(self._cut(at, at + len(piece)))
            at += len(piece) + len(sep)
        return cut

    def splitlines(self, keepends: bool = False) -> list[Any]:
        self._read("splitlines")
        cut: list[TrackedText] = []
        at = 0
        for line in str.splitlines(self, True):
            kept = line if keepends else line.splitlines()[0]
            cut.append(self._cut(at, at + len(kept)))
            at += len(line)
        return cut

    def partition(self, sep: str, /) -> tuple[Any, Any, Any]:
        self._read("partition")
        before, middle, _ = str.partition(self, sep)
        a, b = len(before), len(before) + len(middle)
        return self._cut(0, a), self._cut(a, b), self._cut(b, str.__len__(self))

    def rpartition(self, sep: str, /) -> tuple[Any, Any, Any]:
        self._read("rpartition")
        before, middle, _ = str.rpartition(self, sep)
        a, b = len(before), len(before) + len(middle)
        return self._cut(0, a), self._cut(a, b), self._cut(b, str.__len__(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        self._read("replace")
        if not old:
            text = str.replace(self, old, new, count)
            return TrackedText.of(MarkedText.of_row(text), self.watch, is_rough=True)
        pieces = self._pieces(str.split(self, old, count), old)
        parts: list[str] = []
        for piece in pieces:
            parts += [new, piece]
        return TrackedText.concat(parts[1:])

    def removeprefix(self, prefix: str, /) -> str:
        self._read("removeprefix")
        size = len(prefix) if str.startswith(self, prefix) else 0
        return self._cut(size, str.__len__(self))

    def removesuffix(self, suffix: str, /) -> str:
        self._read("removesuffix")
        size = len(suffix) if str.endswith(self, suffix) else 0
        return self._cut(0, str.__len__(self) - size)


_plain = str.__str__  # of a subclass: the exact string


def _reading(name: str) -> Callable[..., Any]:
    """A method of `str` that notes its use; text that it yields is marked from end to end."""
    plain = getattr(str, name)

    def method(self: TrackedText, *args: Any, **kwargs: Any) -> Any:
        self._read(name)
        result = plain(self, *args, **kwargs)
        if isinstance(result, str):
            marked = MarkedText.of_row(_plain(result))
            return TrackedText.of(marked, self.watch, is_rough=True)
        return result

    method.__name__ = name
    return method


_READING = (
    "__contains__",
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__hash__",
    "__len__",
    "__mod__",
    "__rmod__",
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "rfind",
    "rindex",
    "rjust",
    "startswith",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
)

for _name in _READING:
    setattr(TrackedText, _name, _reading(_name))
