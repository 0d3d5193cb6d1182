"""A whole job with a scripted engine: what it writes, and how it ends."""

import io
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted import (
    ScriptedEngine,
    ScriptedText,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
)
from scripted_job import Job

from batchmla.errors import DeviceError, JobError, StorageError
from batchmla.jobs.seams import LoadedEngine, Seams
from batchmla.jobs.store import Store
from batchmla.jobs.summary import read_summary

OWN = [
    "row_id", "reasoning", "content", "tool_calls", "finish_reason", "reasoning_state", "lossy",
    "prompt_tokens", "cached_tokens", "reasoning_tokens", "content_tokens", "tool_error", "error",
]  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, sample_texts(350))


def test_every_row_once_in_input_order_with_the_columns_of_the_contract(job: Job) -> None:
    summary = job.run(ScriptedEngine())
    assert summary.exit_code == 0 and job.is_successful
    assert job.table().column_names == ["doc", "text", *OWN]
    rows = job.rows()
    assert [row["doc"] for row in rows] == [f"d{i}" for i in range(350)]
    assert all(row["row_id"] == row["doc"] for row in rows)
    assert job.parts() == [f"part-{n:05d}.parquet" for n in range(4)]
    assert [pq.read_metadata(job.output / name).num_rows for name in job.parts()] == [100] * 3 + [
        50
    ]
    assert not job.segments()
    assert summary.done == summary.rows == 350 and summary.left == 0
    generated = sum(row["reasoning_tokens"] + row["content_tokens"] + 1 for row in rows)
    assert summary.generated_tokens == generated
    assert summary.prompt_tokens == sum(row["prompt_tokens"] for row in rows)
    assert read_summary(job.output) == summary


def test_an_input_without_rows_gives_an_empty_part_and_loads_nothing(tmp_path: Path) -> None:
    for knows_rows in (True, False):
        folder = tmp_path / str(knows_rows)
        folder.mkdir()
        job = Job(folder, [])
        assert job.run(None, knows_rows=knows_rows).exit_code == 0
        assert job.is_successful and job.parts() == ["part-00000.parquet"]
        assert job.table().num_rows == 0 and job.table().column_names[-1] == "error"
        assert job.run(None, knows_rows=knows_rows).exit_code == 0


def test_rows_that_fail_have_an_error_and_touch_no_other(tmp_path: Path) -> None:
    texts = sample_texts(300)
    job = Job(tmp_path, texts)
    job.run(ScriptedEngine())
    good = job.rows()
    (tmp_path / "bad").mkdir()
    texts[5], texts[200] = "bad", "poison"
    bad = Job(tmp_path / "bad", texts)
    summary = bad.run(ScriptedEngine())
    assert summary.exit_code == 0 and summary.failed == 2 and bad.is_successful
    rows = bad.rows()
    assert [row for i, row in enumerate(rows) if i not in (5, 200)] == [
        row for i, row in enumerate(good) if i not in (5, 200)
    ]
    for index, error in ((5, "column text is bad"), (200, "poison in the prompt")):
        assert rows[index]["error"] == error and rows[index]["finish_reason"] == "error"
        assert rows[index]["content"] is None and rows[index]["reasoning"] is None


@pytest.mark.parametrize(("most", "exit_code"), [(3, 0), (2, 1), (0.02, 1), (0.04, 0)])
def test_errors_max_decides_between_success_and_1(
    tmp_path: Path, most: float, exit_code: int
) -> None:
    job = Job(tmp_path, ["bad"] * 3 + sample_texts(97))
    job.sections = {"errors": {"max": most}}
    summary = job.run(ScriptedEngine())
    assert summary.exit_code == exit_code and job.is_successful == (exit_code == 0)
    assert len(job.rows()) == 100
    if exit_code:
        assert "errors.max" in summary.reason
        job.sections = {"errors": {"max": 3}}
        assert job.run(None).exit_code == 0 and job.is_successful


def test_stop_after_ends_a_job_whose_first_rows_all_fail(tmp_path: Path) -> None:
    job = Job(tmp_path, ["poison"] * 400)
    job.sections = {"errors": {"stop_after": 20}}
    summary = job.run(ScriptedEngine(delay_s=0.001))
    assert summary.exit_code == 1 and "poison in the prompt" in summary.reason
    assert 20 <= summary.done < 400 and not job.is_successful
    done = summary.done
    job.sections = {"errors": {"stop_after": 1000}}
    again = job.run(ScriptedEngine(), text=ScriptedText(poison="none"))
    assert again.rows_this_run == 400 - done and again.done == 400


def test_all_rows_failing_before_the_engine_load_no_model(tmp_path: Path) -> None:
    job = Job(tmp_path, ["bad"] * 30)
    assert job.run(None).exit_code == 1
    assert [row["error"] for row in job.rows()] == ["column text is bad"] * 30


def test_a_name_clash_names_the_prefix_as_the_way_out(tmp_path: Path) -> None:
    job = Job(tmp_path, ["a"])
    table = pq.read_table(job.source)
    pq.write_table(table.append_column("content", pa.array(["mine"])), job.source)
    with pytest.raises(JobError, match=r"'content'.*output\.prefix"):
        job.run(None)
    job.sections = {"output": {"prefix": "model_"}}
    assert job.run(ScriptedEngine()).exit_code == 0
    row = job.rows()[0]
    assert row["content"] == "mine" and row["model_content"] and row["model_row_id"] == "d0"


def test_a_malformed_row_found_late_keeps_the_rows_before_it(job: Job) -> None:
    job.sections = {"engine": {"window_rows": 50}}  # the reader is at most so far ahead
    with pytest.raises(JobError, match="row 340: malformed"):
        job.run(ScriptedEngine(), faulty=340, knows_rows=False)
    assert not job.is_successful
    left = job.run(ScriptedEngine()).rows_this_run
    assert 10 <= left <= 10 + 50 and len(job.rows()) == 350


@pytest.mark.parametrize("error", [RuntimeError("broken"), DeviceError("lost")])
def test_an_engine_that_breaks_leaves_finished_rows(job: Job, error: Exception) -> None:
    engine = ScriptedEngine(fail_after=150, error=error)
    with pytest.raises(type(error), match=str(error)):
        job.run(engine)
    assert engine.is_closed and not job.is_successful
    assert job.run(ScriptedEngine()).rows_this_run == 200
    assert len(job.rows()) == 350


def test_an_error_is_in_the_log_and_left_to_the_caller_to_say(job: Job) -> None:
    stream = io.StringIO()
    console = logging.StreamHandler(stream)
    logging.getLogger().addHandler(console)
    try:
        with pytest.raises(DeviceError):
            job.run(ScriptedEngine(fail_after=20, error=DeviceError("the card is lost; find it")))
    finally:
        logging.getLogger().removeHandler(console)
    log = (job.output / "_batchmla" / "run.log").read_text()
    assert log.count("ERROR ended with exit code 3: the card is lost; find it") == 1
    assert "the card is lost" not in stream.getvalue()
    job.run(ScriptedEngine())  # the file was closed
    log = (job.output / "_batchmla" / "run.log").read_text()
    assert log.count("the card is lost") == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_finished_rows_and_a_rerun_goes_on(job: Job, signum: int) -> None:
    def interrupt(num_done: int) -> None:
        if num_done == 130:
            os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    summary = job.run(ScriptedEngine(on_completion=interrupt))
    assert summary.exit_code == 128 + signum and signal.getsignal(signum) is before
    assert 129 <= summary.done <= 130 and not job.is_successful
    again = job.run(ScriptedEngine())
    assert again.rows_this_run == 350 - summary.done and len(job.rows()) == 350


def test_a_signal_while_waiting_for_the_reader(job: Job) -> None:
    class Stuck(ScriptedText):
        def prompts(self, rows: Any) -> Any:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            threading.Event().wait(0.6)
            return super().prompts(rows)

    summary = job.run(None, text=Stuck())
    assert summary.exit_code == 143 and summary.done == 0


def test_a_full_disk_is_a_storage_error_and_resumable(job: Job) -> None:
    class Full(Store):
        def publish(self, name: str, target: Path) -> None:
            if name == "part-00002.parquet":
                (self.aside / name).unlink()  # as a write without space leaves it
            super().publish(name, target)

    with pytest.raises(StorageError, match=r"part-00002\.parquet.*finished rows are kept"):
        job.run(ScriptedEngine(), store=Full)
    assert not job.is_successful and job.parts() == ["part-00000.parquet", "part-00001.parquet"]
    assert job.run(ScriptedEngine()).exit_code == 0
    assert [row["doc"] for row in job.rows()] == [f"d{i}" for i in range(350)]


def test_carried_metadata_and_types_stay(tmp_path: Path) -> None:
    job = Job(tmp_path, [])
    schema = pa.schema(
        [
            pa.field("doc", pa.string(), metadata={"unit": "id"}),
            pa.field("text", pa.large_string(), nullable=False),
            pa.field("when", pa.timestamp("us", tz="UTC")),
            pa.field("kind", pa.dictionary(pa.int8(), pa.string())),
        ],
        metadata={"origin": "here"},
    )
    columns = [["d0", "d1"], ["a", "b"], [1, None], ["x", "y"]]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), job.source)
    job.run(ScriptedEngine())
    written = pq.read_schema(job.output / "part-00000.parquet")
    carried = pq.read_schema(job.source)
    for field in carried:
        assert written.field(field.name).equals(field, check_metadata=True)
    assert written.metadata == carried.metadata == {b"origin": b"here"}


def test_packing_does_not_change_the_output(tmp_path: Path) -> None:
    tables = []
    for order in ("auto", "input"):
        (tmp_path / order).mkdir()
        job = Job(tmp_path / order, sample_texts(350))
        job.sections = {"engine": {"order": order, "window_rows": 40}}
        engine = ScriptedEngine(max_running=8)
        job.run(engine)
        tables.append(job.table())
        assert (engine.seen == sorted(engine.seen)) == (order == "input")
        assert all(
            seen < first + 40 + 8 for seen, first in zip(engine.seen, range(350), strict=True)
        )
    assert tables[0].equals(tables[1])


def test_the_engine_gets_a_learned_length(job: Job) -> None:
    engine = ScriptedEngine(max_running=8)
    job.run(engine)
    assert engine.expected[0] == 64  # max_tokens bounds the first guess
    assert engine.expected[-1] is not None and 16 <= engine.expected[-1] <= 34


def test_summary_has_what_a_scheduler_reads(job: Job) -> None:
    said = job.run(ScriptedEngine()).as_dict()
    for name in ("rows", "done", "failed", "prompt_tokens", "cached_tokens", "reasoning_tokens",
                 "content_tokens", "engine_seconds", "wall_seconds", "output", "exit_code",
                 "preemptions", "tokens_per_second", "duplicates"):  # fmt: skip
        assert said[name] is not None
    assert said["settings"]["output.rows_per_file"] == {"value": 100, "source": "file"}
    assert said["effective"] == {"max_num_seqs": 64}
    assert json.loads(json.dumps(said)) == said


def test_seams_are_called_in_order_and_the_engine_last(job: Job) -> None:
    calls: list[str] = []
    seams = scripted_seams(ScriptedEngine())

    def noted(name: str, function: Any) -> Any:
        return lambda *args: (calls.append(name), function(*args))[1]

    def load(spec: Any) -> LoadedEngine:
        raise DeviceError("no room")

    noted_seams = Seams(
        store=noted("store", seams.store),
        table=noted("table", seams.table),
        text=noted("text", seams.text),
        engine=noted("engine", load),
    )
    with pytest.raises(DeviceError, match="no room"):
        run_scripted(scripted_spec(job.source, job.output), noted_seams)
    assert calls == ["store", "table", "text", "engine"]
