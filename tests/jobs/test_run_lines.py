"""Whole jobs whose output is lines: parts, resumes, retries, damage, and a batch end to end."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    PARAMS,
    ScriptedEngine,
    ScriptedText,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
)
from scripted_job import Job

from batchmla.core import Prompt
from batchmla.errors import JobError
from batchmla.jobs.read import open_job_input
from batchmla.jobs.row import Row
from batchmla.jobs.spec import LoadedSpec, build_spec

FORMATS = ["jsonl", "openai_batch"]
HEALED = "not any more"


def job_of(folder: Path, texts: list[str], form: str) -> Job:
    job = Job(folder, texts)
    job.sections = {"output": {"format": form}, "errors": {"max": 10}}
    return job


def lines(output: Path) -> list[dict[str, Any]]:
    """The rows of all parts, without times and ids made from a job's id."""
    found = []
    for path in sorted(output.glob("part-*.jsonl")):
        for text in path.read_bytes().split(b"\n")[:-1]:
            line = json.loads(text)
            line.pop("id", None)
            if line.get("response") is not None:
                line["response"].pop("request_id")
                line["response"]["body"] |= {"id": None, "created": None}
            found.append(line)
    return found


def parts(output: Path) -> list[str]:
    return sorted(path.name for path in output.glob("part-*"))


@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_lines_of_parts_in_input_order(tmp_path: Path, form: str) -> None:
    texts = sample_texts(250)
    texts[7] = "bad"
    job = job_of(tmp_path, texts, form)
    summary = job.run(ScriptedEngine())
    assert summary.exit_code == 0 and summary.failed == 1 and job.is_successful
    assert parts(job.output) == [f"part-0000{n}.jsonl" for n in range(3)]
    found = lines(job.output)
    name = "row_id" if form == "jsonl" else "custom_id"
    assert [line[name] for line in found] == [f"d{n}" for n in range(250)]
    if form == "jsonl":
        (tmp_path / "as_parquet").mkdir()
        same = Job(tmp_path / "as_parquet", texts)
        same.run(ScriptedEngine())
        assert found == same.rows()


@pytest.mark.parametrize("form", FORMATS)
def test_a_job_cut_short_or_longer_ends_with_the_same_lines(tmp_path: Path, form: str) -> None:
    job = job_of(tmp_path, sample_texts(250), form)
    job.run(ScriptedEngine(), limit=40)
    assert len(lines(job.output)) == 40
    with pytest.raises(RuntimeError):
        job.run(ScriptedEngine(fail_after=100))
    job.run(ScriptedEngine())
    cut = lines(job.output)
    job.run(ScriptedEngine(), fresh=True)
    assert lines(job.output) == cut and len(cut) == 250
    assert job.run(None).done == 250


@pytest.mark.parametrize("form", FORMATS)
def test_retried_rows_take_the_place_of_failed_ones(tmp_path: Path, form: str) -> None:
    texts = sample_texts(250)
    for place in (3, 150, 249):
        texts[place] = "poison"
    job = job_of(tmp_path, texts, form)
    assert job.run(ScriptedEngine()).failed == 3
    before = lines(job.output)
    summary = job.run(ScriptedEngine(), retry_failed=True, text=ScriptedText(poison=HEALED))
    after = lines(job.output)
    assert [n for n in range(250) if before[n] != after[n]] == [3, 150, 249]
    assert summary.failed == 0 and summary.exit_code == 0
    job.run(ScriptedEngine(), fresh=True, text=ScriptedText(poison=HEALED))
    assert lines(job.output) == after


@pytest.mark.parametrize("form", FORMATS)
def test_a_damaged_part_is_made_again(tmp_path: Path, form: str) -> None:
    job = job_of(tmp_path, sample_texts(250), form)
    job.run(ScriptedEngine())
    before = lines(job.output)
    part = job.output / "part-00001.jsonl"
    part.write_bytes(part.read_bytes()[:-20])
    engine = ScriptedEngine()
    job.run(engine)
    assert sorted(engine.seen) == list(range(100, 200))
    assert lines(job.output) == before


def test_the_format_of_an_output_is_fixed(tmp_path: Path) -> None:
    job = job_of(tmp_path, sample_texts(50), "jsonl")
    job.run(ScriptedEngine(), limit=20)
    job.sections = {"output": {"format": "parquet"}}
    for accepted in (False, True):
        with pytest.raises(JobError, match=r"begun with output\.format jsonl, not parquet"):
            job.run(None, accept_changes=accepted)


@pytest.mark.parametrize("form", FORMATS)
def test_an_input_without_rows_gives_an_empty_part(tmp_path: Path, form: str) -> None:
    job = job_of(tmp_path, [], form)
    assert job.run(None).exit_code == 0 and job.is_successful
    assert (job.output / "part-00000.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"output": {"format": "jsonl", "compression": "zstd"}}, "output.compression is for"),
        ({"output": {"format": "openai_batch", "prefix": "x"}}, "output.prefix: output.format"),
        ({"output": {"format": "openai_batch"}, "input": {"columns": ["a"]}}, "carries no columns"),
    ],
)
def test_what_does_not_go_with_a_format_is_refused(
    tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobError, match=said):
        scripted_spec(tmp_path / "in", tmp_path / "out", **sections)
    scripted_spec(
        tmp_path / "in", tmp_path / "out", output={"format": "jsonl", "compression": "none"}
    )


class BatchText(ScriptedText):
    """Prompts are the bytes of a request's last text."""

    columns = ("url", "body")

    def prompts(self, rows: Sequence[Row]) -> Sequence[Prompt | str]:
        return [row.error or self._made(row) for row in rows]

    def _made(self, row: Row) -> Prompt:
        body = row.values["body"]
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        made = self._prompt(row._replace(values={"text": text}))
        assert isinstance(made, Prompt) and made.params == PARAMS
        return made


def batch_job(folder: Path) -> LoadedSpec:
    return build_spec(
        {
            "model": {"path": "scripted"},
            "input": {"path": str(folder / "requests.jsonl"), "format": "openai_batch"},
            "output": {"path": str(folder / "out"), "format": "openai_batch"},
            "errors": {"malformed": "row", "max": 0.2},
        }
    )


def test_a_batch_file_goes_through_to_its_results(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hello"}]
    requests = [
        {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": talk}},
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "once"}},
        {"custom_id": "c", "url": "/v1/completions"},
    ] + [
        {"custom_id": f"r{n}", "url": "/v1/completions", "body": {"prompt": f"p{n}"}}
        for n in range(9)
    ]
    source = tmp_path / "requests.jsonl"
    source.write_text("".join(json.dumps({"method": "POST", **one}) + "\n" for one in requests))
    seams = scripted_seams(ScriptedEngine(), text=BatchText())
    seams = replace(seams, table=open_job_input)
    summary = run_scripted(batch_job(tmp_path), seams)
    assert (summary.exit_code, summary.failed, summary.done) == (0, 1, 12)
    found = lines(tmp_path / "out")
    assert [line["custom_id"] for line in found[:2]] == ["a", "b"]
    kinds = [line["response"] and line["response"]["body"]["object"] for line in found[:3]]
    assert kinds == ["chat.completion", "text_completion", None]
    assert found[2]["custom_id"] == "requests.jsonl:2"  # it could not be read
    assert "a request of a batch has a body" in found[2]["error"]["message"]
