"""Jobs whose model is spread over several processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from batchmla.jobs.report import write_report

ROWS = 24
JOB = {
    "model": {"path": "builtin:tally", "device": "cpu", "dtype": "float32"},
    "prompt": {"raw": "text"},
    "sampling": {"temperature": 0, "max_tokens": 40, "ignore_eos": True},
    "engine": {"max_num_seqs": 8},
}


def write_job(
    folder: Path, name: str, tensor: int, expert: int = 1, attention_data: int = 1,
    **sampling: object,
) -> Path:  # fmt: skip
    source = folder / "rows.jsonl"
    lines = [
        json.dumps({"id": i, "text": f"receipt {i}: {i * 7 % 13} x 1.20"}) for i in range(ROWS)
    ]
    source.write_text("\n".join(lines) + "\n")
    job = JOB | {
        "model": JOB["model"]
        | {"parallel": {"tensor": tensor, "expert": expert, "attention_data": attention_data}},
        "input": {"path": str(source)},
        "output": {"path": str(folder / name), "rows_per_file": 10},
        "sampling": JOB["sampling"] | sampling,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(job))
    return path


def start(job: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "batchmla", "run", str(job), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def token_texts(output: Path) -> dict[str, str]:
    table = pq.read_table(output, columns=["row_id", "content"])
    return dict(zip(*table.to_pydict().values(), strict=True))


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process(process.pid).children(recursive=True)
        if "spawn_main" in " ".join(each.cmdline())
    ]


def wait_for_rows(process: subprocess.Popen[str], output: Path) -> list[psutil.Process]:
    """Until the job has saved some rows; its ranks."""
    until_s = time.monotonic() + 120
    while not list((output / "_batchmla").glob("**/*.seg")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.05)
    return ranks_of(process)


def test_fc_162_two_jobs_on_ranks_at_once_and_one_rank(tmp_path: Path) -> None:
    """They meet in files of their own: no port can be taken. The text is that of one rank."""
    jobs = [write_job(tmp_path, "a", 2), write_job(tmp_path, "b", 1, 2, 2)]
    processes, summaries = [start(job) for job in jobs], []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        summaries.append(json.loads(out))
        assert summaries[-1]["done"] == ROWS
    assert summaries[0]["expert_load"] is None
    load = summaries[1]["expert_load"]
    assert len(load["holder_tokens"]) == 2 and min(load["holder_tokens"]) > 0
    assert 1 <= load["busiest_holder"] <= 2
    assert "choices of experts by rank" in write_report(tmp_path / "b").read_text()
    one = start(write_job(tmp_path, "one", 1))
    _, err = one.communicate(timeout=240)
    assert one.returncode == 0, err
    assert (
        token_texts(tmp_path / "a") == token_texts(tmp_path / "b") == token_texts(tmp_path / "one")
    )


@pytest.mark.parametrize(("number", "words", "sizes"), [
    (signal.SIGSTOP, "rank 1 has given no sign of life", (2, 1, 1)),
    (signal.SIGKILL, "rank 1 was ended by SIGKILL", (1, 2, 2)),
])  # fmt: skip
def test_fc_161_a_lost_rank_ends_the_job_and_a_new_run_goes_on(
    tmp_path: Path, number: int, words: str, sizes: tuple[int, int, int]
) -> None:
    job = write_job(tmp_path, "out", *sizes, max_tokens=200)
    process = start(job)
    (rank,) = wait_for_rows(process, tmp_path / "out")
    os.kill(rank.pid, number)
    struck_s = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert time.monotonic() - struck_s < 30
    assert re.search(words, err) and "Traceback" not in err, err
    assert not rank.is_running(), "an orphan"
    fewer = write_job(tmp_path, "out", 1, max_tokens=200)  # another number of ranks may go on
    again = start(fewer)
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert json.loads(out)["done"] == ROWS
    assert sorted(token_texts(tmp_path / "out"), key=int) == [str(i) for i in range(ROWS)]


def test_fc_160_signals_reach_a_job_on_ranks_and_leave_no_orphan(tmp_path: Path) -> None:
    job = write_job(tmp_path, "out", 2, max_tokens=200)
    process = start(job)
    (rank,) = wait_for_rows(process, tmp_path / "out")
    os.kill(rank.pid, signal.SIGTERM)  # as a scheduler does that signals all processes
    process.send_signal(signal.SIGTERM)
    sent_s = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert time.monotonic() - sent_s < 10
    assert not rank.is_running(), "an orphan"


def test_ranks_end_with_a_job_that_is_killed(tmp_path: Path) -> None:
    process = start(write_job(tmp_path, "out", 2, max_tokens=200))
    (rank,) = wait_for_rows(process, tmp_path / "out")
    process.kill()
    process.wait()
    until_s = time.monotonic() + 10
    while rank.is_running() and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not rank.is_running(), "an orphan"
