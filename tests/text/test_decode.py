"""Ids back into text: whole characters over any tokens, exact white space, always valid Unicode."""

import json
import random

import numpy as np
import pytest
import vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.core import Completion, FinishReason
from batchmla.text.formats.registry import choose_format
from batchmla.text.reasoning import Reasoner
from batchmla.text.tokenizer import Tokenizer

TEXTS = [
    "🦙👩‍👩‍👧‍👦🇩🇪", "龘齉𠮷𪚥", "é กำ हिन्दी", "\ufffd\ufffd end", "a\ufffdb", "  two  spaces ",
    "\n\ttab\r\n", "\x00\x01\x7f", "ﬁ e\u0301 \u200b",
]  # fmt: skip


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request, tmp_path_factory):
    at = tmp_path_factory.mktemp("model")
    make = vocabulary.byte_level if request.param == "bytes" else vocabulary.piece_level
    return Tokenizer.load(make(at) if request.param == "bytes" else make(at, template=None))


@pytest.mark.parametrize("text", TEXTS)
def test_fc_050_text_comes_back_and_is_not_lossy(tokenizer, text):
    ids = tokenizer.encode_plain(text)
    decoded = tokenizer.decode(ids)
    if text.encode() == tokenizer.decoder.bytes_of(ids):  # SentencePiece puts a space in front
        assert (decoded.text, decoded.is_lossy) == (text, False)
    else:
        assert (decoded.text, decoded.is_lossy) == (" " + text, False)


@pytest.mark.parametrize("text", TEXTS)
def test_fc_050_a_character_may_be_split_at_every_token(tokenizer, text):
    """The bytes of a prefix are a prefix of the bytes: nothing depends on what comes next."""
    ids = tokenizer.encode_plain(text).tolist()
    whole = tokenizer.decoder.bytes_of(ids)
    for end in range(len(ids) + 1):
        head = tokenizer.decoder.bytes_of(ids[:end])
        assert whole.startswith(head)
        decoded = tokenizer.decode(ids[:end])
        assert decoded.text.encode().decode() == decoded.text
        try:
            head.decode()
        except UnicodeDecodeError:
            assert decoded.is_lossy and decoded.text.endswith("\ufffd")
            assert whole.decode().startswith(decoded.text[:-1])
        else:
            assert not decoded.is_lossy and whole.decode().startswith(decoded.text)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_fc_050_any_ids_are_valid_text_with_a_true_lossy_flag(data, tokenizer):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    decoded = tokenizer.decode(ids)
    json.dumps(decoded.text).encode()
    decoded.text.encode("utf-8", errors="strict")
    raw = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert decoded.text == raw.decode(errors="replace")
    assert decoded.is_lossy == (decoded.text.encode() != raw)


def test_a_completion_keeps_its_leading_space(tokenizer):
    """A completion begins in the middle of a text: its first token's space is the model's."""
    ids = tokenizer.encode_plain("a b").tolist()
    words = [n for n in ids if tokenizer.token_bytes(n).startswith(b" ")]
    assert words and tokenizer.decode(words[-1:]).text.startswith(" ")


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_fc_052_a_limit_inside_a_character(tmp_path, num_tokens, finish):
    tokenizer = Tokenizer.load(vocabulary.byte_level(tmp_path))
    reasoner = Reasoner(tokenizer, choose_format("auto", tokenizer))
    ids = _byte_ids(tokenizer, "ab🦙".encode())
    kept = ids[: 2 + num_tokens]
    completion = Completion(
        row_id="r", index=0, token_ids=np.array(kept, np.int32),
        finish_reason=FinishReason(finish), prompt_tokens=1,
    )  # fmt: skip
    answer = reasoner.split(completion, is_open=False)
    assert answer.content == "ab\ufffd" and answer.is_lossy
    assert answer.content_tokens == len(kept)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_fc_082_a_forced_end_inside_a_character(tmp_path, budget):
    tokenizer = Tokenizer.load(vocabulary.byte_level(tmp_path))
    reasoner = Reasoner(tokenizer, choose_format("auto", tokenizer))
    inside = _byte_ids(tokenizer, "🦙".encode())[:budget]
    ids = [*inside, *reasoner.end_ids, *_byte_ids(tokenizer, "🦙 ok".encode())]
    completion = Completion(
        row_id="r", index=0, token_ids=np.array(ids, np.int32), finish_reason=FinishReason.STOP,
        prompt_tokens=1, forced_at=budget,
    )  # fmt: skip
    answer = reasoner.split(completion, is_open=True, forced_ids=reasoner.end_ids)
    assert (answer.reasoning, answer.content, answer.is_lossy) == ("\ufffd", "🦙 ok", True)
    assert answer.state == "budget" and answer.reasoning_tokens == budget


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    singles = {tokenizer.token_bytes(n): n for n in reversed(range(len(tokenizer)))}
    return [singles[data[at : at + 1]] for at in range(len(data))]


def test_trimmed_bytes_go_from_the_last_token(tmp_path):
    tokenizer = Tokenizer.load(vocabulary.byte_level(tmp_path))
    reasoner = Reasoner(tokenizer, choose_format("auto", tokenizer))
    random_ = random.Random(1)
    ids = tokenizer.encode_plain("the answer is here").tolist()
    for _ in range(20):
        last = tokenizer.token_bytes(ids[-1])
        trimmed = random_.randrange(len(last))
        completion = Completion(
            row_id="r", index=0, token_ids=np.array(ids, np.int32),
            finish_reason=FinishReason.STOP, prompt_tokens=1, trimmed_bytes=trimmed,
        )  # fmt: skip
        want = "the answer is here"[: len("the answer is here") - trimmed]
        assert reasoner.split(completion, is_open=False).content == want
        assert reasoner.split(completion, is_open=True).reasoning == want
        ids = tokenizer.encode_plain("the answer is here").tolist()
