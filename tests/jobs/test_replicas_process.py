"""The shipped model on replicas, the run in a process of its own: what signals and deaths leave."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from batchmla.cli import app

pytest.importorskip("ray", reason="ray is not installed")

from ray_nodes import add_node, ray_nodes
from ray_tally import ROWS, TallyJob, are_gone, replica_processes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes(2, 1) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def one_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The rows of a run without Ray."""
    job = TallyJob(tmp_path_factory.mktemp("one"), address=None)
    job.finish("out")
    return job.table("out").drop_columns(["cached_tokens"])


def test_exact_rows_whatever_dies_and_wherever_they_run(
    cluster: Any, one_engine: Any, tmp_path: Path
) -> None:
    """Three nodes, four replicas, one process killed and one node removed in the midst."""
    extra = add_node(cluster, 1)
    job = TallyJob(tmp_path, cluster.address, replicas=4)
    process = job.start("out")
    job.wait_for_rows("out", process)
    os.kill(replica_processes()[0].pid, signal.SIGKILL)
    cluster.remove_node(extra)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert (summary["done"], summary["failed"], summary["duplicates"]) == (ROWS, 0, 0)
    assert "was lost" in err and "Traceback" not in err
    found = job.table("out").drop_columns(["cached_tokens"])
    assert found.equals(one_engine)
    assert are_gone(replica_processes())


def test_a_run_that_is_killed_leaves_no_replica_and_goes_on(
    cluster: Any, one_engine: Any, tmp_path: Path
) -> None:
    """By SIGTERM, which saves what is finished, then by SIGKILL, then to the end."""
    job = TallyJob(tmp_path, cluster.address)
    process = job.start("out")
    job.wait_for_rows("out", process)
    replicas = replica_processes()
    process.send_signal(signal.SIGTERM)
    sent_s = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and time.monotonic() - sent_s < 10, err
    saved = int(out.split('"done": ')[1].split(",")[0])
    assert 0 < saved < ROWS
    assert replicas and are_gone(replicas), "an orphan"

    process = job.start("out")
    until_s = time.monotonic() + 120
    while not (replicas := replica_processes()):
        assert process.poll() is None and time.monotonic() < until_s
        time.sleep(0.1)
    process.kill()
    process.communicate()
    assert are_gone(replicas), "an orphan"

    job.replicas = 2
    summary = job.finish("out")
    assert summary["rows_this_run"] <= ROWS - saved and summary["duplicates"] == 0
    assert job.table("out").drop_columns(["cached_tokens"]).equals(one_engine)


def test_a_cluster_that_a_run_started_ends_with_it_even_when_killed(tmp_path: Path) -> None:
    """Its replica lies on two processes, which end too."""
    job = TallyJob(tmp_path, "local", tensor=2)
    process = job.start("out")
    job.wait_for_rows("out", process)
    started = psutil.Process(process.pid).children(recursive=True)
    names = {each.pid: each.name() for each in started}
    assert {"raylet", "gcs_server"} <= set(names.values())
    assert any("spawn_main" in " ".join(each.cmdline()) for each in started)
    process.kill()
    process.communicate()
    # Ray's agents end too, but first try for half a minute to tell their cluster
    started = [each for each in started if "Agent" not in names[each.pid]]
    assert are_gone(started), names


def test_a_model_that_fits_nowhere_is_one_sentence_and_exit_3(cluster: Any, tmp_path: Path) -> None:
    job = str(TallyJob(tmp_path, cluster.address).write("out"))
    done = CliRunner().invoke(app, ["run", job, "--set", "model.memory_utilization=1e-9"])
    assert done.exit_code == 3 and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()
