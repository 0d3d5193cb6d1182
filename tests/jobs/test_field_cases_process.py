"""Field cases of processes, signals and logs: how a run ends, and what it says meanwhile."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults import QuickStore
from job_server import Jobs
from scripted import (
    ScriptedEngine,
    ScriptedTable,
    ScriptedText,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
    write_rows,
)
from scripted_job import Job

from batchmla.errors import JobError
from batchmla.jobs.lease import is_held
from batchmla.jobs.seams import LoadedEngine
from batchmla.jobs.store import Effect
from batchmla.jobs.summary import read_summary

BOTH = [signal.SIGTERM, signal.SIGINT]


def interrupt(signum: int) -> None:
    os.kill(os.getpid(), signum)


class Interrupted:
    """A job that gets a signal at one place of its way."""

    def __init__(self, folder: Path, place: str, signum: int) -> None:
        self.job = Job(folder, sample_texts(250))
        self.place, self._signum = place, signum

    def run(self) -> Any:
        engine = ScriptedEngine(on_completion=self._on_completion, max_running=16)
        seams = replace(
            scripted_seams(engine, store=self._store),
            table=self._table,
            engine=lambda spec: self._load(engine),
        )
        return run_scripted(scripted_spec(self.job.source, self.job.output), seams)

    def _table(self, spec: Any) -> ScriptedTable:
        self._come("scan")
        return ScriptedTable(self.job.source)

    def _load(self, engine: ScriptedEngine) -> LoadedEngine:
        self._come("load")
        return LoadedEngine(engine=engine, effective={})

    def _on_completion(self, num_done: int) -> None:
        if num_done == 1:
            self._come("first row")
        if num_done == 120:
            self._come("rows")

    def _store(self, root: Path) -> QuickStore:
        come = self._come

        class Signalling(QuickStore):
            """Signals ahead of the publication of a segment or a part."""

            def before(self, effect: Effect, path: Path, source: Path | None = None) -> None:
                super().before(effect, path, source)
                if effect == "rename" and path.suffix == ".seg":
                    come("segment")
                if effect == "rename" and path.name == "part-00001.parquet":
                    come("part")

        return Signalling(root)

    def _come(self, place: str) -> None:
        if place == self.place:
            self.place = ""
            interrupt(self._signum)


@pytest.mark.parametrize("place", ["scan", "load", "first row", "rows", "segment", "part"])
@pytest.mark.parametrize("signum", BOTH)
def test_fc_160_a_signal_anywhere_saves_what_is_done_and_ends_soon(
    tmp_path: Path, place: str, signum: signal.Signals
) -> None:
    interrupted = Interrupted(tmp_path, place, signum)
    job, began_s = interrupted.job, time.monotonic()
    summary = interrupted.run()
    assert not interrupted.place and time.monotonic() - began_s < 10
    assert not is_held(job.output)
    threads = {thread.name for thread in threading.enumerate()}
    assert not threads & {"reader", "writer", "progress", "lease"}
    if summary.exit_code == 0:  # every row was done when it came
        assert place in ("segment", "part") and job.is_successful
        return
    assert summary.exit_code == 128 + signum and not job.is_successful
    again = job.run(ScriptedEngine())
    assert again.rows_this_run == 250 - summary.done
    assert [row["doc"] for row in job.rows()] == [f"d{i}" for i in range(250)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(write_rows(tmp_path_factory.mktemp("process") / "in.parquet", sample_texts(360)))
    yield jobs
    jobs.close()


@pytest.mark.parametrize("signum", [*BOTH, signal.SIGKILL])
def test_fc_160_no_process_outlives_its_run(
    jobs: Jobs, tmp_path: Path, signum: signal.Signals
) -> None:
    jobs.start(tmp_path / "out")
    jobs.read("started")
    process = psutil.Process(jobs.pid)
    family = [process, *process.children(recursive=True)]
    os.kill(jobs.pid, signum)
    if signum != signal.SIGKILL:
        exit_code, *_ = jobs.read("done")
        assert int(exit_code) == 128 + signum
    assert jobs.end() == (-signum if signum == signal.SIGKILL else 0)
    assert not [each for each in family if each.is_running()]
    assert not is_held(tmp_path / "out")
    assert jobs.finish(tmp_path / "out") <= 360


def test_fc_163_the_process_ends_soon_after_its_last_row(jobs: Jobs, tmp_path: Path) -> None:
    for attempt in range(3):
        jobs.start(tmp_path / str(attempt))
        exit_code, num_rows, _ = jobs.read("done")
        ended_s = time.monotonic()
        assert (jobs.end(), int(exit_code), int(num_rows)) == (0, 0, 360)
        assert time.monotonic() - ended_s < 5


def test_fc_164_jobs_run_again_in_one_process_after_errors_and_in_an_event_loop(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, sample_texts(60))
    with pytest.raises(RuntimeError):
        job.run(ScriptedEngine(fail_after=20))
    assert job.run(ScriptedEngine()).exit_code == 0
    assert job.run(None).exit_code == 0

    async def from_a_notebook() -> list[Any]:
        first = job.run(ScriptedEngine(), fresh=True)
        beside = asyncio.to_thread(job.run, ScriptedEngine(), fresh=True)
        return [first, await asyncio.wait_for(beside, 60)]

    for summary in asyncio.run(from_a_notebook()):
        assert (summary.exit_code, summary.rows_this_run) == (0, 60)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


SCRIPT = """\
import logging, sys
from pathlib import Path
from scripted import *
from batchmla.cli import configure_logging
from batchmla.jobs.run import run_job
configure_logging(False)
loaded = scripted_spec(Path(sys.argv[1]), Path(sys.argv[2]))
run_job(loaded, seams=scripted_seams(ScriptedEngine()))
"""


def test_fc_165_a_log_file_gets_plain_lines(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.parquet", sample_texts(500))
    support = Path(__file__).parent.parent / "support"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(support)!r})\n{SCRIPT}"]
    with (tmp_path / "log").open("wb") as log:
        command += [str(source), str(tmp_path / "out")]
        assert subprocess.run(command, stderr=log, stdout=log).returncode == 0
    text = (tmp_path / "log").read_text()
    assert 1 <= len(text.splitlines()) < 50
    assert "500 of 500 rows done, 0 failed" in text
    assert "\r" not in text and "\x1b" not in text
    kept = (tmp_path / "out" / "_batchmla" / "run.log").read_text()
    assert all(line[:4].isdigit() for line in kept.splitlines())  # each with its time


def test_fc_169_typos_are_refused_together_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(JobError) as refused:
        scripted_spec(
            tmp_path / "in.parquet",
            tmp_path / "out",
            sampling={"max_token": 64, "temprature": 0.7, "top_p": 1.5, "n": 0},
            reasoning={"budgett": 128},
            engine={"compute": 4, "tensor_parallel": "2"},
        )
    message = str(refused.value)
    for words in ("sampling.max_token", "max_tokens?", "sampling.temprature", "temperature?",
                  "sampling.top_p", "sampling.n", "reasoning.budgett", "reasoning.budget?",
                  "engine.compute", "engine.tensor_parallel"):  # fmt: skip
        assert words in message
    assert refused.value.exit_code == 2 and not (tmp_path / "out").exists()


def test_the_summary_says_what_was_in_force_and_why(tmp_path: Path) -> None:
    job = Job(tmp_path, sample_texts(30))
    job.sections = {"sampling": {"temperature": 0.5}}
    job.run(ScriptedEngine())
    summary = read_summary(job.output)
    assert summary is not None and summary.exit_code == 0
    assert summary.settings["sampling.temperature"] == {"value": 0.5, "source": "file"}
    assert summary.settings["sampling.seed"] == {"value": 0, "source": "default"}
    assert summary.effective == {"max_num_seqs": 64}
    assert (summary.rows, summary.done, summary.left, summary.failed) == (30, 30, 0, 0)


def test_a_watchdog_sees_the_heartbeat_before_the_first_row(tmp_path: Path) -> None:
    job = Job(tmp_path, sample_texts(30))
    seen: list[dict[str, Any]] = []

    class Slow(ScriptedText):
        """Renders after a look at the lease."""

        def prompts(self, rows: Any) -> Any:
            seen.append(json.loads((job.output / "_batchmla" / "lease").read_text()))
            return super().prompts(rows)

    job.run(ScriptedEngine(), text=Slow())
    assert seen[0]["pid"] == os.getpid() and abs(seen[0]["beat_s"] - time.time()) < 30
    beat = json.loads((job.output / "_batchmla" / "progress.json").read_text())
    assert beat["done"] == 30 and beat["phase"] == "writing" and beat["at_s"] <= time.time()


def test_a_log_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, sample_texts(30))
    job.run(ScriptedEngine(), limit=10)
    log = job.output / "_batchmla" / "run.log"
    log.unlink()
    log.symlink_to("/dev/full")
    logging.getLogger("batchmla").setLevel(logging.INFO)
    try:
        assert job.run(ScriptedEngine()).exit_code == 0
    finally:
        logging.getLogger("batchmla").setLevel(logging.NOTSET)
    assert "Traceback" not in capfd.readouterr().err
