"""Banned words: which tokens would complete one of them now, whatever the tokens before are.

The words are searched in bytes, inside longer words, too, so none of them ever stands in the text.
Control tokens are no text: they are never banned, and no word goes over one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from batchmla.core import TokenIds
from batchmla.text.tokenizer import Tokenizer

MOST_KEPT = 64  # tables; rows may bring more words, whose tables are made again when they are due


class Vocabulary:
    """The bytes of every id, b"" for control tokens, and the ordinary tokens sorted by them."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        pairs = sorted((text, token_id) for token_id, text in enumerate(texts) if text)
        self._texts = [text for text, _ in pairs]
        self._ids = np.array([token_id for _, token_id in pairs], np.int32)
        self.table = lru_cache(maxsize=MOST_KEPT)(self._table)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """That of a model."""
        ids = np.arange(len(tokenizer), dtype=np.int32)
        is_control = tokenizer.is_control(ids).tolist()
        return cls([b"" if is_control[n] else tokenizer.token_bytes(n) for n in ids.tolist()])

    def _table(self, words: tuple[bytes, ...]) -> "_Table":
        return _Table(words, self)

    def beginning_with(self, start: bytes) -> TokenIds:
        """Ids of the tokens that begin with these bytes of UTF-8, in which there is no 0xff."""
        first = bisect_left(self._texts, start)
        return self._ids[first : bisect_left(self._texts, start + b"\xff", lo=first)]

    def holding(self, part: bytes) -> TokenIds:
        """Ids of the tokens that hold these bytes."""
        return self._ids[[place for place, text in enumerate(self._texts) if part in text]]


class _Table:
    """What some words forbid: `always_ids`, and more where the text ends in a key of `rest_ids`."""

    def __init__(self, words: Sequence[bytes], vocabulary: Vocabulary) -> None:
        self.most_tail_bytes = max(map(len, words)) - 1
        self.always_ids = _union([vocabulary.holding(word) for word in words])
        rests: dict[bytes, list[TokenIds]] = {}
        for word in words:
            for size in range(1, len(word)):
                rests.setdefault(word[:size], []).append(vocabulary.beginning_with(word[size:]))
        self.rest_ids = {start: _union(parts) for start, parts in rests.items()}


class BannedWords:
    """A `BanRule`. The words are not empty."""

    def __init__(self, words: Sequence[str], vocabulary: Vocabulary) -> None:
        assert words and all(words), "an empty word is in every text"
        self.words = tuple(word.encode() for word in words)
        self._vocabulary = vocabulary

    def watch(self) -> "BannedNow":
        """A watch at the beginning of a completion."""
        return BannedNow(self._vocabulary.table(self.words), self._vocabulary.texts)


class BannedNow:
    """A `BanWatch`."""

    def __init__(self, table: _Table, texts: Sequence[bytes]) -> None:
        self._table = table
        self._texts = texts
        self._tail = b""

    def push(self, token_id: int) -> None:
        """Notes a token."""
        text = self._texts[token_id]
        tail = self._tail + text if text else b""
        self._tail = tail[max(0, len(tail) - self._table.most_tail_bytes) :]

    def banned_ids(self) -> TokenIds:
        """The ids that would complete a banned word now."""
        tail, rests = self._tail, self._table.rest_ids
        parts = [rests[tail[at:]] for at in range(len(tail)) if tail[at:] in rests]
        return np.concatenate((self._table.always_ids, *parts))


def _union(parts: Sequence[TokenIds]) -> TokenIds:
    ids: TokenIds = np.unique(np.concatenate(parts))
    return ids
