"""Prompts cut to fit: where, by how much, and what stays whole."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import vocabulary
from echo_job import EchoJob
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.jobs.truncate import Side, room_of, shortened
from batchmla.text.marked import MarkedText
from batchmla.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("limit", "max_tokens", "room"),
    [(100, None, 75), (100, 10, 90), (100, 1, 99), (100, 60, 50), (100, 10**9, 50), (2, None, 1)],
)
def test_an_answer_has_room(limit: int, max_tokens: int | None, room: int) -> None:
    assert room_of(limit, max_tokens) == room


def pairs(text: MarkedText) -> int:
    """A measure like a tokenizer's: runs of a letter count a token for each two."""
    runs, last = [0], ""
    for letter in text.text:
        if letter == last:
            runs[-1] += 1
        else:
            runs.append(1)
        last = letter
    return sum(-(-run // 2) for run in runs)


@given(
    st.lists(st.tuples(st.text("ab", max_size=40), st.booleans()), max_size=5),
    st.integers(0, 60),
    st.sampled_from(["truncate_left", "truncate_right", "truncate_middle"]),
)
@settings(max_examples=300, deadline=None)
def test_what_is_kept_fits_and_is_part_of_the_longest_text(
    parts: list[tuple[str, bool]], room: int, side: Any
) -> None:
    text = MarkedText.join(MarkedText.of_row(one) if is_row else one for one, is_row in parts)
    made = shortened(text, side, room, pairs)
    if made is None:
        longest = max(text.spans, key=lambda span: span[1] - span[0], default=(0, 0))
        rest = MarkedText(text.text[: longest[0]] + text.text[longest[1] :])
        assert not text.spans or pairs(rest) > room
        return
    assert pairs(made) <= room
    assert "".join(made.unmarked()) == "".join(text.unmarked())
    if pairs(text) <= room:
        assert made.text == text.text


def test_as_much_as_fits_is_kept() -> None:
    long = "".join(chr(0x4E00 + place) for place in range(20_000))
    text = MarkedText.join(["<", MarkedText.of_row(long), ">", MarkedText.of_row("xyz")])
    sides: tuple[Side, ...] = ("truncate_left", "truncate_right", "truncate_middle")
    for side in sides:
        made = shortened(text, side, 2000, lambda one: len(one.text))
        assert made is not None and 1990 <= len(made.text) <= 2000
        count = len(made.text) - len("<>xyz")
        left = {"truncate_left": 0, "truncate_right": count}.get(side, -(-count // 2))
        assert made.text == f"<{long[:left]}{long[len(long) - count + left :]}>xyz"


@pytest.mark.parametrize(
    ("side", "start", "end"),
    [
        ("truncate_left", "in short: ", "the last word"),
        ("truncate_right", "in short: the first word", ""),
        ("truncate_middle", "in short: the first word", "the last word"),
    ],
)
def test_rows_that_are_too_long_are_cut_and_run(
    tmp_path: Path, side: str, start: str, end: str
) -> None:
    long = "the first word " + "and more of it " * 400 + "the last word"
    huge = "the first word " + "spam " * 500_000 + "the last word"
    texts = ["the first word to the last word", long, None, huge]
    pq.write_table(pa.table({"id": list(range(4)), "t": texts}), tmp_path / "in.parquet")
    job = EchoJob(tmp_path, tmp_path / "in.parquet", limit_tokens=200)
    job.run(prompt={"raw": "in short: {{ t }}!", "too_long": side}, sampling={"max_tokens": 300})
    rows = job.rows()
    assert [row["error"] is None for row in rows] == [True, True, False, True]
    assert rows[0]["content"] == "in short: the first word to the last word!"
    for row in (rows[1], rows[3]):
        assert 95 <= row["prompt_tokens"] <= 100  # half of the context is the answer's
        assert row["content"].startswith(start) and row["content"].endswith(end + "!")


def test_a_chat_template_stays_whole(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": ["word " * 5000]}), tmp_path / "in.parquet")
    job = EchoJob(tmp_path, tmp_path / "in.parquet", limit_tokens=100)
    prompt = {"system": "Be brief.", "user": "{{ t }}", "too_long": "truncate_right"}
    job.run(prompt=prompt, output={"token_ids": True}, sampling={"max_tokens": 20})
    (row,) = job.rows()
    assert row["error"] is None and 75 <= row["prompt_tokens"] <= 80
    text = Tokenizer.load(tmp_path / "model").decode(row["prompt_token_ids"]).text
    assert text.startswith(vocabulary.BOS + "Be brief." + vocabulary.USER + "word word")
    assert text.endswith(vocabulary.ASSISTANT + "<think>\n")


def test_a_template_that_does_not_fit_alone_fails_the_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": ["word " * 500]}), tmp_path / "in.parquet")
    job = EchoJob(tmp_path, tmp_path / "in.parquet", limit_tokens=40)
    job.run(prompt={"raw": "~" * 50 + "{{ t }}", "too_long": "truncate_left"})
    (error,) = job.errors()
    assert error is not None and error.endswith("even without its longest text from the row")
