"""Field cases of rows and prompts: one poor row, and what becomes of it and of the others."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo_job import EchoEngine, EchoJob

from batchmla.errors import JobError
from batchmla.jobs.run import run_job
from batchmla.jobs.spec import build_spec


def put(folder: Path, rows: list[Any], name: str = "in.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(*prompts: str) -> list[dict[str, str]]:
    return [{"id": f"r{n}", "prompt": prompt} for n, prompt in enumerate(prompts)]


LONG = "word " * 2000


def test_fc_001_one_over_long_prompt_fails_alone(tmp_path: Path) -> None:
    rows = [{"id": f"r{n:03d}", "prompt": f"Say the word {n}."} for n in range(20)]
    rows.insert(3, {"id": "LONG", "prompt": LONG})
    job = EchoJob(tmp_path, put(tmp_path, rows), limit_tokens=512)
    engine = EchoEngine()
    assert job.run(engine).exit_code == 0
    assert 3 not in engine.seen and len(engine.seen) == 20  # measured before it gets there
    found = job.rows()
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert [row["error"] is None for row in found] == [row["id"] != "LONG" for row in rows]
    assert [row["content"] for row in found if row["id"] != "LONG"] == [
        row["prompt"] for row in rows if row["id"] != "LONG"
    ]


def test_fc_002_over_long_prompts_are_row_errors_with_their_lengths(tmp_path: Path) -> None:
    rows = words(*[LONG + str(n) for n in range(9)], "short")
    job = EchoJob(tmp_path, put(tmp_path, rows), limit_tokens=512)
    summary = job.run()
    assert summary.exit_code == 0 and (summary.done, summary.failed) == (10, 9)
    assert (job.output / "_SUCCESS").exists()
    for error in job.errors()[:9]:
        assert error is not None and error.startswith("the prompt is too long: ")
        assert "at most 511 fit (context of 512 tokens, one of them for the answer)" in error
    assert job.contents()[9] == "short"
    strict = job.run(fresh=True, errors={"max": 0.5})
    assert strict.exit_code == 1 and not (job.output / "_SUCCESS").exists()


def test_fc_004_the_context_edge_has_one_rule(tmp_path: Path) -> None:
    # each "~" is one token: no merge of the vocabulary has two of them
    rows = words("~" * 62, "~" * 63, "~" * 64, "~" * 65)
    job = EchoJob(tmp_path, put(tmp_path, rows), limit_tokens=64)
    job.run(sampling={"max_tokens": 16})
    found = job.rows()
    assert [row["prompt_tokens"] for row in found[:2]] == [62, 63]
    assert [row["error"] is None for row in found] == [True, True, False, False]
    assert "64 tokens, at most 63 fit" in found[2]["error"]
    assert "65 tokens, at most 63 fit" in found[3]["error"]
    assert [row["finish_reason"] for row in found] == ["length", "length", "error", "error"]


@pytest.mark.parametrize("prompt", [{"raw": "prompt"}, {"user": "{{ prompt }}"}])
def test_fc_005_an_empty_prompt_is_the_rows_matter(tmp_path: Path, prompt: dict[str, str]) -> None:
    texts = ["Hello.", "", "   ", "\n\n", "Bye."]
    job = EchoJob(tmp_path, put(tmp_path, words(*texts)))
    assert job.run(prompt=prompt).exit_code == 0
    if "raw" in prompt:
        assert job.errors() == [None, "the prompt is empty", None, None, None]
        assert job.contents() == ["Hello.", None, "   ", "\n\n", "Bye."]
    else:  # the chat template's own tokens are a prompt
        assert job.errors() == [None] * 5


NULL_ROWS = '{"id": "a", "prompt": "Hello."}\n{"id": "b", "prompt": null}\n{"id": "c"}\n' + (
    '{"id": "d", "prompt": NaN}\n{"id": "e", "prompt": "Bye."}\n'
)


@pytest.mark.parametrize("prompt", [{"raw": "prompt"}, {"user": "Tell me about {{ prompt }}"}])
def test_fc_007_nulls_never_become_words(tmp_path: Path, prompt: dict[str, str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(NULL_ROWS)
    job = EchoJob(tmp_path, path)
    job.run(prompt=prompt)
    errors = job.errors()
    assert [error is None for error in errors] == [True, False, False, False, True]
    assert errors[1] == "column 'prompt' is null" and errors[3] is not None
    shown = json.dumps(job.rows())
    assert "None" not in shown and "about nan" not in shown


def test_fc_007_nulls_of_parquet_columns_fail_their_rows(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": ["a", "b", "c"],
            "prompt": ["Hello.", None, "Bye."],
            "company": ["Acme", None, "Foo"],
            "year": [2001, None, 2003],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    job = EchoJob(tmp_path, tmp_path / "in.parquet")
    job.run(prompt={"raw": "About {{ company }} in {{ year }}"})
    assert job.contents() == ["About Acme in 2001", None, "About Foo in 2003"]
    assert job.errors()[1] is not None and "null" in str(job.errors()[1])
    nan = pa.table({"id": ["a", "b"], "prompt": [float("nan"), 1.5]})
    pq.write_table(nan, tmp_path / "in.parquet")
    job.run(fresh=True)
    assert job.contents() == [None, "1.5"] and job.errors()[0] == "column 'prompt' is NaN"


def test_fc_009_repeated_ids_are_refused_with_both_places(tmp_path: Path) -> None:
    rows = [
        {"id": "same", "prompt": "Say one."},
        {"id": "same", "prompt": "Say two."},
        {"id": "other", "prompt": "Say three."},
        {"id": 7, "prompt": "Say four."},
        {"id": "7", "prompt": "Say five."},
    ]
    path = put(tmp_path, rows)
    job = EchoJob(tmp_path, path)
    with pytest.raises(JobError) as caught:
        job.run()
    said = str(caught.value)
    assert "the input has 1 repeated id:" in said  # 7 and "7" are two
    assert f"{path}:2: the id 'same' was already used at {path}:1" in said
    assert not (job.output / "part-00000.parquet").exists()
    put(tmp_path, rows[1:])
    assert job.run(fresh=True).done == 4
    assert [row["row_id"] for row in job.rows()] == ["same", "other", "7", "7"]


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_fc_009_rows_may_be_known_by_their_number(tmp_path: Path, name: str) -> None:
    rows = words("one", "two", "three")
    for row in rows:
        row["id"] = "same"
    if name == "in.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        put(tmp_path, rows)
    job = EchoJob(tmp_path, tmp_path / name)
    with pytest.raises(JobError, match=r"or name another column or row_number in input\.id"):
        job.run()
    job.run(input={"id": "row_number"})
    assert [row["row_id"] for row in job.rows()] == [f"{name}:{n}" for n in range(3)]
    assert [row["id"] for row in job.rows()] == ["same"] * 3
    assert job.contents() == ["one", "two", "three"]


def test_fc_010_equal_prompts_are_different_rows_on_resume(tmp_path: Path) -> None:
    path = put(tmp_path, words(*["Say hi."] * 6))
    job = EchoJob(tmp_path, path)
    with pytest.raises(RuntimeError):
        job.run(EchoEngine(max_running=1, fail_after=2))
    engine = EchoEngine()
    summary = job.run(engine)
    assert len(engine.seen) == 4 and (summary.done, summary.rows) == (6, 6)
    assert [row["id"] for row in job.rows()] == [f"r{n}" for n in range(6)]
    assert job.contents() == ["Say hi."] * 6


def test_fc_011_an_input_that_changed_is_refused(tmp_path: Path) -> None:
    before = [{"id": f"r{n:03d}", "prompt": f"Say the word {n}."} for n in range(10)]
    path = put(tmp_path, before)
    job = EchoJob(tmp_path, path)
    job.run(limit=5)
    changed = [{"id": "new", "prompt": "Say new."}, *(row for row in before if row != before[4])]
    put(tmp_path, changed)
    with pytest.raises(JobError, match=r"was begun with another job:\n +input file in\.jsonl: "):
        job.run()
    same_id = [*before[:2], {"id": "r002", "prompt": "Say another word."}, *before[3:]]
    put(tmp_path, same_id)
    with pytest.raises(JobError, match=r"input file in\.jsonl: "):
        job.run()
    put(tmp_path, before)
    assert job.run().done == 10
    assert job.contents() == [row["prompt"] for row in before]


SURROGATES = (
    '{"id": "a", "prompt": "Hello."}\n'
    '{"id": "b", "prompt": "half \\ud835 char"}\n'
    '{"id": "c", "prompt": "raw byte seen as \\udcb2"}\n'
    '{"id": "d", "prompt": "good pair \\ud83d\\ude00"}\n'
)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_fc_013_lone_surrogates_fail_their_rows(tmp_path: Path, form: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(SURROGATES)
    job = EchoJob(tmp_path, path)
    assert job.run(output={"format": form}).exit_code == 0
    if form == "parquet":
        rows = job.rows()
    else:
        rows = [json.loads(line) for line in (job.output / "part-00000.jsonl").open("rb")]
    sentence = 'column "prompt" holds a lone surrogate, which is no character'
    assert [row["error"] for row in rows] == [None, sentence, sentence, None]
    assert rows[1]["prompt"] == "half \ufffd char"  # what is carried says where it was
    assert rows[3]["content"] == "good pair 😀"


def test_fc_015_bytes_that_are_no_text_are_malformed_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    content = '{"id": "a", "prompt": "Hello."}\n{"id": "b", "prompt": "area in m²"}\n'
    path.write_bytes(content.encode("latin-1"))
    job = EchoJob(tmp_path, path)
    with pytest.raises(JobError, match=r"in\.jsonl:2: byte 0xb2 at position 32 is not UTF-8"):
        job.run()
    job.run(errors={"malformed": "row"})
    assert job.contents() == ["Hello.", None]
    assert "in.jsonl:2: byte 0xb2" in str(job.errors()[1])


def test_fc_015_a_raw_nul_is_the_lines_fault(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "t\0wo"}\n')
    with pytest.raises(JobError, match=r"in\.jsonl:2: not valid JSON: Invalid control character"):
        EchoJob(tmp_path, path).run()


def test_fc_015_nul_and_controls_come_through(tmp_path: Path) -> None:
    texts = ["nul \0 inside", "bell \x07 esc \x1b[31m red", "bom inside \ufeff text"]
    job = EchoJob(tmp_path, put(tmp_path, words(*texts)))
    job.run()
    assert job.contents() == texts
    assert [row["prompt"] for row in job.rows()] == texts


def test_fc_016_a_row_of_megabytes_is_refused_in_little_time(tmp_path: Path) -> None:
    rows = words("short", "spam " * 800_000, "short again")
    job = EchoJob(tmp_path, put(tmp_path, rows), limit_tokens=4096)
    began_s = time.process_time()
    assert job.run().exit_code == 0
    assert time.process_time() - began_s < 5.0
    assert [row["content"] for row in job.rows()] == ["short", None, "short again"]
    assert "the prompt is too long: at least" in str(job.errors()[1])


def test_fc_004_an_answer_cut_by_the_context_says_so(tmp_path: Path) -> None:
    rows = words("~" * 32, "~" * 62, "~" * 63, "~" * 64)
    job = {
        "model": {"path": "builtin:tally", "max_model_len": 64, "device": "cpu"},
        "input": {"path": str(put(tmp_path, rows))},
        "prompt": {"raw": "prompt"},
        "sampling": {"max_tokens": 16, "ignore_eos": True, "temperature": 0},
        "reasoning": {"parser": "none"},
        "output": {"path": str(tmp_path / "out"), "token_ids": True},
        "errors": {"max": 2},
    }
    assert run_job(build_spec(job), progress="off").exit_code == 0
    found = pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    lengths = [row["prompt_tokens"] for row in found]
    for row, length in zip(found, lengths, strict=True):
        if row["error"] is None:
            granted = min(16, 64 - length)
            assert row["finish_reason"] == "length" and len(row["token_ids"]) == granted >= 1
        else:
            assert "at most 63 fit" in row["error"]
    assert [row["error"] is None for row in found] == [True, True, True, False]
