"""Replicas on a Ray cluster of several nodes: whatever dies, every row comes out once.

The nodes are processes of this machine; nothing here is a GPU.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from scripted import sample_texts, scripted_seams, scripted_spec, write_rows

ray = pytest.importorskip("ray", reason="ray is not installed")

from ray_nodes import add_node, ray_nodes  # noqa: E402
from ray_scripted import KILLER, SHAPE, Maker, RayJob, no_memory  # noqa: E402
from scripted import ScriptedEngine, run_scripted  # noqa: E402

from batchmla.errors import DeviceError  # noqa: E402
from batchmla.jobs.replicas_shape import ReplicaShape  # noqa: E402
from batchmla.jobs.replicas_worker import Patience  # noqa: E402

NUM_ROWS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes(2, 1, 1) as nodes:
        yield nodes


@pytest.fixture
def job(cluster: Any, tmp_path: Path) -> RayJob:
    (tmp_path / "marks").mkdir()
    source = write_rows(tmp_path / "in.parquet", sample_texts(NUM_ROWS))
    return RayJob(source, tmp_path / "out", Maker(tmp_path / "marks"), cluster.address)


def with_text(job: RayJob, row: int, text: str) -> None:
    texts = sample_texts(NUM_ROWS)
    texts[row] = text
    write_rows(job.source, texts)


def table_of(output: Path) -> pa.Table:
    return ds.dataset(output).to_table()


def undisturbed(job: RayJob) -> pa.Table:
    """What one engine in this process makes of the same rows."""
    output = job.output.parent / "undisturbed"
    loaded = scripted_spec(job.source, output, **job.sections)
    assert run_scripted(loaded, scripted_seams(ScriptedEngine())).exit_code == 0
    return table_of(output)


def living(job: RayJob) -> list[int]:
    return [pid for pid in job.make.processes() if psutil.pid_exists(pid)]


def at_rows(job: RayJob, count: int, act: Callable[[], None]) -> threading.Thread:
    """Acts once so many rows have tokens, in a thread."""

    def watch() -> None:
        until_s = time.monotonic() + 120
        while time.monotonic() < until_s:
            if job.engine is not None and job.engine.stats().generated_tokens > 17 * count:
                act()
                return
            time.sleep(0.05)
        raise AssertionError("no row ended")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_two_replicas_give_the_rows_of_one_engine(job: RayJob) -> None:
    texts = sample_texts(NUM_ROWS)
    texts[5], texts[150] = "bad", "poison"  # no prompt, and an error of the engine
    write_rows(job.source, texts)
    job.make = Maker(job.make.folder, delay_s=0.03)
    summary = job.run()
    assert (summary.exit_code, summary.done, summary.failed) == (0, NUM_ROWS, 2)
    assert len(job.make.processes()) == 2
    assert summary.rows_this_run == NUM_ROWS and summary.duplicates == 0
    assert table_of(job.output).equals(undisturbed(job))
    assert not living(job), "no process of a replica is left behind"
    assert job.run().rows_this_run == 0


def test_fc_168_a_killed_actor_and_a_lost_node_cost_no_row(cluster: Any, job: RayJob) -> None:
    job.replicas = (4, 4)
    job.make = Maker(job.make.folder, delay_s=0.1)
    extra = add_node(cluster, 1)
    struck = []

    def strike() -> None:
        (pid, *_) = living(job)
        os.kill(pid, signal.SIGKILL)
        struck.append(pid)
        cluster.remove_node(extra)

    watch = at_rows(job, 40, strike)
    summary = job.run()
    watch.join()
    assert struck and job.engine is not None
    assert job.engine.num_lost >= 1
    assert (summary.exit_code, summary.done, summary.failed) == (0, NUM_ROWS, 0)
    assert summary.duplicates == 0
    assert table_of(job.output).equals(undisturbed(job))


@pytest.mark.parametrize("word", ["kill once", "raise once", "hang once"])
def test_a_replica_that_dies_fails_or_hangs_is_replaced(job: RayJob, word: str) -> None:
    with_text(job, 7, word)
    job.patience = Patience(place_s=90, pulse_s=0.5, silent_s=6)
    expected = undisturbed(job)
    summary = job.run()
    assert (summary.exit_code, summary.done, summary.failed) == (0, NUM_ROWS, 0)
    assert (job.make.folder / word).exists()
    assert job.engine is not None and job.engine.num_lost == 1
    assert table_of(job.output).equals(expected)


def test_a_row_that_kills_its_replica_ends_as_its_own_error(job: RayJob) -> None:
    with_text(job, 7, KILLER)
    summary = job.run()
    assert (summary.exit_code, summary.done, summary.failed) == (0, NUM_ROWS, 1)
    rows = table_of(job.output).to_pylist()
    assert "row d7: 4 times a replica died while it ran this row" in rows[7]["error"]
    assert all(row["error"] is None for row in rows if row["row_id"] != "d7")


def test_what_is_wrong_with_the_model_is_the_runs_error(job: RayJob) -> None:
    job.make = Maker(job.make.folder, error=no_memory())
    with pytest.raises(DeviceError, match=r"^replica \d: the weights need 700 GB"):
        job.run()
    assert not living(job) and not (job.output / "_SUCCESS").exists()


def test_replicas_that_die_while_loading_end_the_run(job: RayJob) -> None:
    job.make = Maker(job.make.folder, dies=True)
    job.replicas = (1, 1)
    with pytest.raises(DeviceError, match="ended 3 times while it loaded the model"):
        job.run()


def test_a_replica_of_another_model_is_refused(job: RayJob) -> None:
    job.refusal = "the model on node b is not the one of this machine"
    with pytest.raises(DeviceError, match="not the one of this machine"):
        job.run()


def test_without_a_place_the_run_ends_with_one_sentence(job: RayJob) -> None:
    job.shape = ReplicaShape(num_cpus=64, num_gpus=0, memory_share=1.0)
    job.patience = Patience(place_s=2)
    with pytest.raises(DeviceError) as found:
        job.run()
    assert str(found.value).startswith(
        "executor.replicas: the cluster gave 0 of 2 replicas of 64 CPUs each a place within 2 s"
    )
    assert "\n" not in str(found.value) and not (job.output / "_SUCCESS").exists()


def test_a_run_that_has_lost_all_replicas_ends_resumably(cluster: Any, job: RayJob) -> None:
    extra = add_node(cluster, 3)
    job.replicas = (1, 1)
    job.shape = ReplicaShape(num_cpus=3, num_gpus=0, memory_share=1.0)  # only there
    job.make = Maker(job.make.folder, delay_s=0.1)
    job.patience = Patience(place_s=20, pulse_s=0.5)
    watch = at_rows(job, 20, lambda: cluster.remove_node(extra))
    with pytest.raises(DeviceError, match=r"^all replicas were lost .* of 3 CPUs each within 20 s"):
        job.run()
    watch.join()
    job.shape, job.make = SHAPE, Maker(job.make.folder)
    summary = job.run()
    assert 0 < summary.rows_this_run < NUM_ROWS and summary.done == NUM_ROWS
    assert table_of(job.output).equals(undisturbed(job))


def test_replicas_are_added_while_rows_wait_and_given_back(
    job: RayJob, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job.replicas = (1, 3)
    with_text(job, NUM_ROWS - 1, "slow")
    job.patience = Patience(place_s=90, pulse_s=0.5, idle_s=1)
    job.make = Maker(job.make.folder, delay_s=0.1)
    summary = job.run()
    assert summary.done == NUM_ROWS
    assert len(job.make.processes()) == 3
    assert "rows wait: more replicas asked for: 2" in caplog.text
    assert "has nothing to do and is given back" in caplog.text
    assert table_of(job.output).equals(undisturbed(job))


def test_an_address_where_nobody_answers_is_named() -> None:
    from batchmla.jobs.replicas_cluster import Cluster

    with pytest.raises(DeviceError, match=r"executor.address: nowhere: no Ray cluster"):
        Cluster("nowhere")
