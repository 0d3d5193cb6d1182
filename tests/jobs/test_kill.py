"""Whatever is killed, and whenever: every row once, equal to those of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from scripted import sample_texts, write_rows

SCRIPT = Path(__file__).parent.parent / "support" / "killed_job.py"
NUM_ROWS = 360
KILLED = -signal.SIGKILL


class Jobs:
    """Starts jobs over one input in processes of their own, one after the other."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._server = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = 0

    def start(self, output: Path, kill_at: int = 0) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(f"{self._source}\t{output}\t{kill_at}\n")
        self._server.stdin.flush()
        self.pid = int(self.read("pid")[0])

    def read(self, *words: str) -> list[str]:
        """What follows one of `words` in the next line that begins with one of them."""
        assert self._server.stdout is not None
        for line in self._server.stdout:
            word, *values = line.split()
            assert word != "error" or word in words, line
            if word in words:
                return [*values] if len(words) == 1 else [word, *values]
        raise AssertionError("the server has ended")

    def end(self) -> int:
        return int(self.read("end")[0])

    def finish(self, output: Path) -> int:
        """Runs to the end, and returns how many rows that took."""
        self.start(output)
        exit_code, num_rows, duplicates = map(int, self.read("done"))
        assert (exit_code, duplicates, self.end()) == (0, 0, 0)
        return num_rows

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(10)


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
    for most in (8, 24):  # early deaths make many runs, late ones reach the parts
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
    assert num_killed >= 10


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
