"""The control strings of a vocabulary, and where they stand in a text.

A control string is the text of an added token that a chat format may give a meaning: `<think>`,
`<|im_end|>`. Added tokens that are only white space or one character (several byte-level
vocabularies add such) are plain text and not treated here.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchmla.text.marked import MarkedText, Span

WHITE_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # Unicode's


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """One entry of the added vocabulary with the matching rules that tokenizer.json gives it."""

    token_id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @property
    def is_text(self) -> bool:
        """Whether it is vocabulary for ordinary text rather than a control token."""
        return not self.special and (len(self.content) == 1 or self.content.isspace())


@dataclass(frozen=True, slots=True)
class Match:
    """An added token in a text: [start, end) with the white space it swallows."""

    start: int
    end: int
    token: AddedToken


class ControlStrings:
    """All control strings of a vocabulary, compiled for searching."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        kept = [token for token in tokens if token.content and not token.is_text]
        self.tokens = tuple(sorted(kept, key=lambda token: token.token_id))
        self._by_content = {token.content: token for token in kept}
        # Matched on the raw text before those that are matched on the normalised text.
        raw = [token.content for token in kept if not token.normalized]
        normalized = [token.content for token in kept if token.normalized]
        self._stages = tuple(_Finder(stage) for stage in (raw, normalized) if stage)
        self._any = _Finder(self._by_content) if kept else None

    def matches(self, text: str) -> list[Match]:
        """Leftmost, then longest, in order; none overlap."""
        found: list[Match] = []
        gaps = [(0, len(text))]
        for stage in self._stages:
            hits = [hit for a, b in gaps for hit in self._search(stage, text, a, b)]
            if hits:
                found = sorted(found + hits, key=lambda match: match.start)
                gaps = _gaps(found, len(text))
        return found

    def _search(self, stage: "_Finder", text: str, start: int, end: int) -> list[Match]:
        found: list[Match] = []
        at = start
        for a, b in stage.find(text, start, end):
            token = self._by_content[text[a:b]]
            if token.single_word and (_is_word(text, a - 1) or _is_word(text, b)):
                continue
            while token.lstrip and a > at and _is_space(text[a - 1]):
                a -= 1
            while token.rstrip and b < end and _is_space(text[b]):
                b += 1
            at = b
            found.append(Match(a, b, token))
        return found

    def in_template(self, marked: MarkedText) -> list[Match]:
        """The control strings wholly outside row text: the only ones that may become tokens."""
        if not marked.spans:
            return self.matches(marked.text)
        found: list[Match] = []
        for start, end, is_row in marked.runs():
            if not is_row:
                for match in self.matches(marked.text[start:end]):
                    found.append(Match(match.start + start, match.end + start, match.token))
        return found

    def alike(self, text: str) -> set[str]:
        """The control strings that a text holds in whatever case of letters, case-folded."""
        folded = text.casefold()
        return {own for token in self.tokens if (own := token.content.casefold()) in folded}

    def spans(self, text: str) -> list[Span]:
        """Where a text holds control strings, whatever stands around them; none overlap."""
        return [] if self._any is None else list(self._any.find(text, 0, len(text)))


class _Finder:
    """Finds any of many strings. Their first two characters are a regex, the rest is a look-up:
    one regex of a thousand alternatives takes half a second to compile.
    """

    def __init__(self, contents: Iterable[str]) -> None:
        self._contents = frozenset(contents)
        lengths: dict[str, set[int]] = {}
        for content in self._contents:
            lengths.setdefault(content[:2], set()).add(len(content))
        # A one-character string also starts wherever a longer one with that character does.
        for prefix in lengths:
            if len(prefix) == 2 and prefix[0] in lengths:
                lengths[prefix].add(1)
        self._lengths = {prefix: sorted(sizes, reverse=True) for prefix, sizes in lengths.items()}
        self._starts = re.compile("|".join(map(re.escape, sorted(lengths, key=len, reverse=True))))

    def find(self, text: str, start: int, end: int) -> Iterator[Span]:
        """Leftmost, then longest; none overlap."""
        hit = self._starts.search(text, start, end)
        while hit is not None:
            at = hit.start()
            after = at + 1
            for size in self._lengths[hit.group()]:
                if at + size <= end and text[at : at + size] in self._contents:
                    after = at + size
                    yield at, after
                    break
            hit = self._starts.search(text, after, end)


def _is_word(text: str, at: int) -> bool:
    return 0 <= at < len(text) and (text[at].isalnum() or text[at] == "_")


_SPACE = re.compile(WHITE_SPACE)


def _is_space(character: str) -> bool:
    return _SPACE.match(character) is not None


def _gaps(matches: list[Match], size: int) -> list[Span]:
    edges = [0, *(edge for match in matches for edge in (match.start, match.end)), size]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
