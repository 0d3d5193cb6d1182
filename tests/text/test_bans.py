"""Banned words: whatever is drawn from what is left, none of them stands in the text."""

import numpy as np
import pytest
import vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.text.bans import BannedWords, Vocabulary
from batchmla.text.tokenizer import Tokenizer

LETTERS = [
    b"a",
    b"b",
    b"c",
    b"ab",
    b"bc",
    b"abc",
    b"ca",
    b" b",
    b"",
    b"\xc3",
    b"\xa9",
    b"\xc3\xa9a",
]


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.text("abcé ", min_size=1, max_size=4), min_size=1, max_size=3),
    draws=st.lists(st.integers(0, 10**6), max_size=40),
)
def test_no_sequence_of_allowed_tokens_holds_a_banned_word(
    words: list[str], draws: list[int]
) -> None:
    watch = BannedWords(words, Vocabulary(LETTERS)).watch()
    text = b""
    for draw in draws:
        banned = set(watch.banned_ids().tolist())
        for token_id, piece in enumerate(LETTERS):
            holds = any(word.encode() in text + piece for word in words)
            assert (token_id in banned) == (holds and piece != b""), (text, piece)
        allowed = [token_id for token_id in range(len(LETTERS)) if token_id not in banned]
        token_id = allowed[draw % len(allowed)]
        watch.push(token_id)
        text = text + LETTERS[token_id] if LETTERS[token_id] else b""  # a control token


def test_control_tokens_are_never_banned(tmp_path) -> None:
    tokenizer = Tokenizer.load(vocabulary.byte_level(tmp_path))
    rule = BannedWords(["think", ">", "e"], Vocabulary.of(tokenizer))
    banned = rule.watch().banned_ids()
    assert len(banned) > 0 and not tokenizer.is_control(banned).any()
    texts = [tokenizer.token_bytes(token_id) for token_id in banned.tolist()]
    assert all(any(word in text for word in (b"think", b">", b"e")) for text in texts)
    assert banned.dtype == np.int32


def test_an_empty_word_is_no_rule() -> None:
    with pytest.raises(AssertionError, match="empty word"):
        BannedWords([""], Vocabulary(LETTERS))
