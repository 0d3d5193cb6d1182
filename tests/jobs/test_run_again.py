"""A job run again: when it goes on, what it keeps, and when it refuses."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from scripted import (
    ScriptedEngine,
    ScriptedText,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
    write_rows,
)
from scripted_job import Job

from batchmla.errors import JobError
from batchmla.jobs.lease import Lease
from batchmla.jobs.read import open_input
from batchmla.jobs.seams import Seams
from batchmla.jobs.store import Store
from batchmla.jobs.summary import read_summary


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, sample_texts(350))


def test_a_finished_job_is_left_alone(job: Job) -> None:
    job.run(ScriptedEngine())
    before = {path: path.stat().st_mtime_ns for path in job.output.glob("[p_]*.*")}
    for wishes in ({}, {"limit": 10}, {"retry_failed": True}):
        again = job.run(None, **wishes)
        assert again.exit_code == 0 and again.done == 350 and again.rows_this_run == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert read_summary(job.output).rows_this_run == 350


def test_a_limit_shows_its_rows_and_the_next_run_goes_on(job: Job) -> None:
    engine = ScriptedEngine()
    first = job.run(engine, limit=30)
    assert first.exit_code == 0 and first.left == 320 and not job.is_successful
    assert sorted(engine.seen) == list(range(30))
    assert len(job.rows()) == 30
    engine = ScriptedEngine()
    assert job.run(engine).exit_code == 0 and job.is_successful
    assert sorted(engine.seen) == list(range(30, 350))
    assert [row["doc"] for row in job.rows()] == [f"d{i}" for i in range(350)]


@pytest.mark.parametrize("limit", [349, 350, 351])
def test_a_limit_near_the_end_of_an_uncounted_input(job: Job, limit: int) -> None:
    summary = job.run(ScriptedEngine(), limit=limit, knows_rows=False)
    assert summary.exit_code == 0 and summary.done == min(limit, 350)
    assert job.is_successful == (limit >= 350)


def test_retry_failed_rewrites_the_rows_that_failed_and_no_other(tmp_path: Path) -> None:
    texts = sample_texts(330)
    for index in (3, 150, 151, 329):
        texts[index] = "poison"
    job = Job(tmp_path, texts)
    job.sections = {"errors": {"max": 10}}
    assert job.run(ScriptedEngine()).failed == 4
    before, untouched = job.rows(), (job.output / "part-00002.parquet").stat().st_mtime_ns
    engine = ScriptedEngine()
    healed = ScriptedText(poison="not any more")
    summary = job.run(engine, retry_failed=True, limit=300, text=healed)
    assert sorted(engine.seen) == [3, 150, 151]
    assert summary.exit_code == 0 and summary.failed == 1 and summary.done == 330
    after = job.rows()
    assert [i for i in range(330) if before[i] != after[i]] == [3, 150, 151]
    assert all(after[i]["error"] is None and after[i]["content"] for i in (3, 150, 151))
    assert (job.output / "part-00002.parquet").stat().st_mtime_ns == untouched
    assert job.is_successful and not job.segments()
    assert job.run(None).failed == 1


def test_a_retry_cut_short_keeps_what_it_did(tmp_path: Path) -> None:
    texts = sample_texts(300)
    for index in range(0, 300, 10):
        texts[index] = "poison"
    job = Job(tmp_path, texts)
    job.sections = {"errors": {"max": 100}}
    job.run(ScriptedEngine())
    healed = ScriptedText(poison="not any more")
    with pytest.raises(RuntimeError):
        job.run(ScriptedEngine(fail_after=12), retry_failed=True, text=healed)
    assert not job.is_successful
    summary = job.run(None, text=healed)
    assert summary.exit_code == 0 and summary.failed == 30 - 12 and summary.done == 300
    assert sum(row["error"] is not None for row in job.rows()) == 18
    assert job.run(ScriptedEngine(), retry_failed=True, text=healed).failed == 0
    assert all(row["error"] is None for row in job.rows())


def test_a_changed_job_is_refused_with_the_difference_and_the_ways_out(job: Job) -> None:
    job.run(ScriptedEngine(), limit=120)
    job.sections = {"sampling": {"temperature": 0.25}, "model": {"memory_utilization": 0.5}}
    with pytest.raises(JobError) as refusal:
        job.run(None)
    message = str(refusal.value)
    assert "sampling.temperature: null → 0.25" in message and "memory" not in message
    assert "--accept-changes" in message and "--fresh" in message
    summary = job.run(ScriptedEngine(), accept_changes=True)
    assert summary.exit_code == 0 and summary.rows_this_run == 230
    manifest = json.loads((job.output / "_batchmla" / "manifest.json").read_text())
    assert manifest["job"]["sampling.temperature"] == {"value": 0.25, "source": "file"}
    assert manifest["earlier"][0]["job"]["sampling.temperature"]["value"] is None
    assert job.run(None).exit_code == 0


def test_another_prompt_or_input_is_refused_and_a_free_field_is_not(job: Job) -> None:
    job.run(ScriptedEngine(), limit=120)
    with pytest.raises(JobError, match="prompt"):
        job.run(None, text=ScriptedText(prompt_hash="another"))
    job.sections = {"errors": {"max": 7}, "engine": {"order": "input"}}
    job.run(ScriptedEngine(), limit=200)
    write_rows(job.source, sample_texts(360))
    with pytest.raises(JobError, match=r"in\.parquet"):
        job.run(None)


def real_input(engine: ScriptedEngine | None) -> Seams:
    """The scripted seams over the real reader."""
    seams = scripted_seams(engine)
    return replace(
        seams, table=lambda spec: open_input(spec.input, malformed=spec.errors.malformed)
    )


def test_files_that_follow_are_picked_up_and_others_refused(tmp_path: Path) -> None:
    folder, output = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    loaded = scripted_spec(folder, output)
    write_rows(folder / "b.parquet", sample_texts(130))
    assert run_scripted(loaded, real_input(ScriptedEngine())).exit_code == 0
    before = ds.dataset(output).to_table().to_pylist()
    write_rows(folder / "c.parquet", ["one more", "and another"])
    engine = ScriptedEngine()
    summary = run_scripted(loaded, real_input(engine))
    assert (summary.exit_code, summary.rows, sorted(engine.seen)) == (0, 132, [130, 131])
    after = ds.dataset(output).to_table().to_pylist()
    assert after[:130] == before and [row["text"] for row in after[130:]] == [
        "one more",
        "and another",
    ]
    assert after[131]["row_id"] == "c.parquet:1"
    write_rows(folder / "c.parquet", ["one more", "changed", "and a third"])
    with pytest.raises(JobError, match=r"c\.parquet"):
        run_scripted(loaded, real_input(None))
    summary = run_scripted(loaded, real_input(ScriptedEngine()), accept_changes=True)
    assert summary.rows_this_run == 1 and ds.dataset(output).to_table().num_rows == 133
    write_rows(folder / "a.parquet", ["comes first"])
    for wishes in ({}, {"accept_changes": True}):
        with pytest.raises(JobError, match=r"b\.parquet.*--fresh"):
            run_scripted(loaded, real_input(None), **wishes)


def test_jsonl_with_a_malformed_row_ends_or_becomes_an_error_row(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    lines = [json.dumps({"doc": f"d{i}", "text": f"text {i}"}) for i in range(30)]
    lines[20] = '{"doc": "d20", "te'
    source.write_text("\n".join(lines))
    with pytest.raises(JobError, match=r"jsonl:21: not valid JSON"):
        run_scripted(scripted_spec(source, output), real_input(None))
    loaded = scripted_spec(source, output, errors={"malformed": "row", "max": 1})
    assert run_scripted(loaded, real_input(ScriptedEngine())).exit_code == 0
    rows = ds.dataset(output).to_table().to_pylist()
    assert len(rows) == 30 and [row["row_id"] for row in rows if row["error"]] == ["in.jsonl:20"]
    assert run_scripted(loaded, real_input(None)).exit_code == 0


def test_other_columns_are_refused_even_when_changes_are_accepted(job: Job) -> None:
    job.run(ScriptedEngine(), limit=120)
    job.sections = {"output": {"token_ids": True}}
    with pytest.raises(JobError, match="token_ids"):
        job.run(None, accept_changes=True)
    assert job.run(ScriptedEngine(), fresh=True).exit_code == 0
    row = job.rows()[7]
    assert bytes(row["prompt_token_ids"]).decode() == row["text"]
    assert len(row["token_ids"]) == row["reasoning_tokens"] + row["content_tokens"] + 1


def test_fresh_deletes_what_is_ours_and_nothing_else(job: Job) -> None:
    job.run(ScriptedEngine())
    foreign = [job.output / "notes.txt", job.output / "_batchmla" / "segments" / "x.seg"]
    for path in foreign:
        path.write_text("mine")
    engine = ScriptedEngine()
    job.sections = {"output": {"rows_per_file": 200}}
    assert job.run(engine, fresh=True).exit_code == 0
    assert len(engine.seen) == 350 and job.parts() == ["part-00000.parquet", "part-00001.parquet"]
    assert all(path.read_text() == "mine" for path in foreign)


def test_a_part_of_somebody_else_is_refused(job: Job) -> None:
    job.output.mkdir()
    stranger = write_rows(job.output / "part-00000.parquet", ["x"])
    for fresh in (False, True):
        with pytest.raises(JobError, match="not written by this job"):
            job.run(None, fresh=fresh)
    assert stranger.exists()


def test_a_lost_or_damaged_part_is_made_again_with_the_same_rows(job: Job) -> None:
    job.run(ScriptedEngine())
    before = job.rows()
    (job.output / "part-00001.parquet").unlink()
    (job.output / "part-00003.parquet").write_bytes(b"PAR1 and no more")
    engine = ScriptedEngine()
    assert job.run(engine).exit_code == 0
    assert sorted(engine.seen) == [*range(100, 200), *range(300, 350)]
    assert job.rows() == before


def test_a_second_run_is_refused_and_names_the_holder(job: Job) -> None:
    store = Store(job.output)
    store.open()
    with Lease(store), pytest.raises(JobError, match=f"in use .*pid {os.getpid()}"):
        job.run(None)
    assert job.run(ScriptedEngine()).exit_code == 0


def test_the_lease_of_a_dead_process_is_taken_over(job: Job) -> None:
    Store(job.output).open()
    (job.output / "_batchmla" / "lease").write_text('{"host": "here", "pid": 1, "since": 0}')
    assert job.run(ScriptedEngine()).exit_code == 0
