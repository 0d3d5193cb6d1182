"""Whatever is killed, and whenever: every row once, equal to those of an undisturbed run."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from job_server import Jobs
from scripted import sample_texts, write_rows

NUM_ROWS = 360
KILLED = -signal.SIGKILL


def output_table(output: Path) -> pa.Table:
    assert (output / "_SUCCESS").exists()
    assert not list((output / "_batchmla" / "segments").iterdir())
    return ds.dataset(output).to_table()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    texts = sample_texts(NUM_ROWS)
    texts[17] = "bad"
    texts[333] = "poison"
    jobs = Jobs(write_rows(tmp_path_factory.mktemp("kill") / "in.parquet", texts))
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    assert jobs.finish(output) == NUM_ROWS
    table = output_table(output)
    assert table.column("doc").to_pylist() == [f"d{i}" for i in range(NUM_ROWS)]
    return table


def test_sigkill_at_operations_on_the_disk(
    jobs: Jobs, undisturbed: pa.Table, tmp_path: Path
) -> None:
    dice = random.Random(0)
    num_killed = 0
    for most in (20, 60):  # early deaths make many runs, late ones reach the parts
        output = tmp_path / str(most)
        for _ in range(7):
            jobs.start(output, dice.randint(1, most))
            status = jobs.end()
            assert status in (0, KILLED)
            num_killed += status == KILLED
            if status == 0:
                break
        jobs.finish(output)
        assert output_table(output).equals(undisturbed)
    assert num_killed >= 8


def test_sigkill_at_random_moments(jobs: Jobs, undisturbed: pa.Table, tmp_path: Path) -> None:
    dice = random.Random(1)
    num_killed = 0
    for attempt in range(2):
        output = tmp_path / str(attempt)
        for _ in range(5):
            jobs.start(output)
            word, *_ = jobs.read("started", "end")
            if word == "end":
                break  # no row was left
            time.sleep(dice.uniform(0, 0.06))
            os.kill(jobs.pid, signal.SIGKILL)
            num_killed += jobs.end() == KILLED
        jobs.finish(output)
        assert output_table(output).equals(undisturbed)
    assert num_killed >= 5


def test_sigterm_saves_within_ten_seconds(
    jobs: Jobs, undisturbed: pa.Table, tmp_path: Path
) -> None:
    jobs.start(tmp_path / "out")
    jobs.read("started")
    started_s = time.monotonic()
    os.kill(jobs.pid, signal.SIGTERM)
    exit_code, num_rows, _ = map(int, jobs.read("done"))
    assert exit_code == 143 and time.monotonic() - started_s < 10
    assert jobs.end() == 0
    assert jobs.finish(tmp_path / "out") == NUM_ROWS - num_rows
    assert output_table(tmp_path / "out").equals(undisturbed)


def test_a_second_signal_stops_at_once(jobs: Jobs, undisturbed: pa.Table, tmp_path: Path) -> None:
    jobs.start(tmp_path / "out")
    jobs.read("started")
    for _ in range(20):
        os.kill(jobs.pid, signal.SIGTERM)
    assert jobs.end() in (0, 143)  # 0: the first one was already enough
    jobs.finish(tmp_path / "out")
    assert output_table(tmp_path / "out").equals(undisturbed)
