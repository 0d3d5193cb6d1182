"""The split of completions into reasoning and content: states, counts, texts."""

import numpy as np
import pytest
import vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.core import Completion, FinishReason
from batchmla.text.formats.format import Format
from batchmla.text.formats.registry import choose_format
from batchmla.text.reasoning import Reasoner, ReasoningState
from batchmla.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(vocabulary.byte_level(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reasoner(tokenizer):
    return Reasoner(tokenizer, choose_format("auto", tokenizer))


def _completion(ids, finish="stop", forced_at=None, error=None):
    return Completion(
        row_id="r",
        index=0,
        token_ids=np.asarray(ids, dtype=np.int32),
        finish_reason=FinishReason(finish),
        prompt_tokens=1,
        forced_at=forced_at,
        error=error,
    )


# (prompt open, completion, finish, reasoning, content, state)
CASES = [
    (False, "<think>a</think>b", "stop", "a", "b", "closed"),
    (True, "a</think>b", "stop", "a", "b", "closed"),
    (True, "a a a", "length", "a a a", "", "length"),
    (True, "Good morning!", "stop", "Good morning!", "", "unclosed"),
    (False, '{"answer": 42}', "stop", None, '{"answer": 42}', "none"),
    (True, "</think>b", "stop", "", "b", "closed"),
    (True, "a</think>b</think>c", "stop", "a", "b</think>c", "closed"),
    (True, "a</think>b<think>c</think>d", "stop", "a", "b<think>c</think>d", "closed"),
    (True, "", "stop", "", "", "unclosed"),
    (True, "", "length", "", "", "length"),
    (False, "", "stop", None, "", "none"),
    (True, "\na\n</think>\n\nb\n", "stop", "\na\n", "\n\nb\n", "closed"),
    (False, "before <think>a</think>b", "stop", "a", "before b", "closed"),
    (False, "before <think>a", "length", "a", "before ", "length"),
    (False, "<think>", "stop", "", "", "unclosed"),
    (True, "a</think>", "stop", "a", "", "closed"),
    (True, "a</think>", "length", "a", "", "closed"),
    (False, "stray</think>b", "stop", None, "stray</think>b", "none"),
    (True, "<think>a</think>b", "stop", "a", "b", "closed"),
    (True, "\n<think>a</think>b", "stop", "\n<think>a", "b", "closed"),
    (True, "a</thi", "length", "a</thi", "", "length"),
    (True, "🙂 東京</think>🙂", "stop", "🙂 東京", "🙂", "closed"),
]


@pytest.mark.parametrize(("is_open", "text", "finish", "reasoning", "content", "state"), CASES)
def test_split(tokenizer, reasoner, is_open, text, finish, reasoning, content, state):
    ids = tokenizer.encode(text)
    answer = reasoner.split(_completion(ids, finish), is_open=is_open)
    assert (answer.reasoning, answer.content, answer.state) == (reasoning, content, state)
    markers = sum(i in (*reasoner.start_ids, *reasoner.end_ids) for i in ids.tolist())
    in_texts = (reasoning or "").count("think>") + content.count("think>")
    assert answer.reasoning_tokens + answer.content_tokens + markers - in_texts == len(ids)
    assert not answer.is_lossy


def test_text_that_only_spells_the_marker_does_not_count(tokenizer, reasoner):
    ids = tokenizer.encode_plain("a</think>b")
    answer = reasoner.split(_completion(ids, "stop"), is_open=True)
    assert answer.reasoning == "a</think>b" and answer.state is ReasoningState.UNCLOSED
    assert answer.reasoning_tokens == len(ids)


def test_an_error_has_no_texts(reasoner):
    answer = reasoner.split(_completion([], "error", error="lost"), is_open=True)
    assert (answer.reasoning, answer.content, answer.state) == (None, None, ReasoningState.NONE)


def test_without_markers_all_is_content(tokenizer):
    plain = Reasoner(tokenizer, choose_format("none", tokenizer))
    ids = tokenizer.encode("a</think>b")
    answer = plain.split(_completion(ids), is_open=False)
    assert (answer.reasoning, answer.content) == (None, "a</think>b")
    assert (answer.reasoning_tokens, answer.content_tokens) == (0, len(ids))
    assert not plain.is_open(tokenizer.encode("<think>"))


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("message", ["", " Enough."])
@pytest.mark.parametrize("is_open", [True, False])
def test_forced_end(tokenizer, reasoner, budget, message, is_open):
    thought = tokenizer.encode("🙂🙃 thinking on")[:budget].tolist()
    message_ids = tokenizer.encode_plain(message).tolist() if message else []
    forced = [*message_ids, *reasoner.end_ids]
    opening = [] if is_open else [*tokenizer.encode("Hm. <think>").tolist()]
    rest = tokenizer.encode(" done</think>.").tolist()
    forced_at = len(opening) + budget
    ids = [*opening, *thought, *forced, *rest]
    answer = reasoner.split(
        _completion(ids, forced_at=forced_at), is_open=is_open, forced_ids=forced
    )
    decoded = tokenizer.decode(thought)
    assert answer.reasoning == decoded.text + message
    assert answer.is_lossy == decoded.is_lossy
    assert answer.content == ("" if is_open else "Hm. ") + " done</think>."
    assert answer.state is ReasoningState.BUDGET
    assert answer.reasoning_tokens == budget
    markers = 0 if is_open else 1
    assert answer.reasoning_tokens + answer.content_tokens + markers + len(forced) == len(ids)


@pytest.mark.parametrize("num_forced", range(4))
def test_max_tokens_inside_the_forced_tokens(tokenizer, reasoner, num_forced):
    forced = [*tokenizer.encode_plain(" Enough now.").tolist()[:3], *reasoner.end_ids]
    thought = tokenizer.encode("a b").tolist()
    ids = [*thought, *forced[:num_forced]]
    answer = reasoner.split(
        _completion(ids, "length", forced_at=len(thought)), is_open=True, forced_ids=forced
    )
    assert answer.state is ReasoningState.LENGTH
    assert answer.content == "" and answer.content_tokens == 0
    assert answer.reasoning == "a b" + tokenizer.decode(forced[:num_forced]).text
    assert answer.reasoning_tokens == len(thought)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<｜User｜>q<｜Assistant｜><think>\n", True),
        ("<｜User｜>q<｜Assistant｜><think>", True),
        ("<｜User｜>q<｜Assistant｜></think>", False),
        ("<｜User｜>q<｜Assistant｜><think>\n\n</think>\n\n", False),
        ("<｜User｜>q<｜Assistant｜>", False),
        ("</think><｜Assistant｜><think>\nWell, ", True),
        ("", False),
    ],
)
def test_the_state_starts_from_the_prompt(tokenizer, reasoner, prompt, is_open):
    assert reasoner.is_open(tokenizer.encode(prompt)) == is_open


def test_markers_spelled_in_row_text_do_not_open(tokenizer, reasoner):
    assert not reasoner.is_open(tokenizer.encode_plain("<think>"))


OWN = Format(name="own", start="[THINK]", end="[/THINK]")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    inside=st.text(alphabet="ab 🙂\n]", max_size=6), after=st.text(alphabet="\n]ab🙃", max_size=6)
)
def test_own_markers_of_plain_text_are_found_in_the_text(tokenizer, inside, after):
    own = Reasoner(tokenizer, OWN)
    assert not own.are_markers_tokens
    ids = tokenizer.encode_plain(f"[THINK]{inside}[/THINK]{after}")
    answer = own.split(_completion(ids), is_open=False)
    assert (answer.reasoning, answer.content) == (inside, after)
    assert answer.state is ReasoningState.CLOSED
    assert 0 <= answer.reasoning_tokens + answer.content_tokens <= len(ids) - 2
    answer = own.split(_completion(ids[:2], "length"), is_open=True)
    assert answer.state is ReasoningState.LENGTH and answer.content == ""


def test_own_markers_open_at_the_end_of_the_prompt_only(tokenizer):
    own = Reasoner(tokenizer, OWN)
    assert own.is_open(tokenizer.encode("question\n[THINK]\n"))
    assert not own.is_open(tokenizer.encode("about [THINK] tags"))
    assert not own.is_open(tokenizer.encode(""))


def test_own_markers_may_be_tokens(tokenizer):
    own = Reasoner(tokenizer, Format(name="own", start="<｜User｜>", end="<｜Assistant｜>"))
    assert own.are_markers_tokens
    answer = own.split(_completion(tokenizer.encode("a<｜Assistant｜>b")), is_open=True)
    assert (answer.reasoning, answer.content) == ("a", "b")
