"""A replica that no node has room for: its ranks on several nodes, which are processes here."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="ray is not installed")

from ray_nodes import add_node, ray_nodes
from ray_tally import TallyJob, are_gone, rank_processes, replica_processes

ROWS = 24


def two_ranks(folder: Path, address: str | None) -> TallyJob:
    return TallyJob(folder, address, tensor=2, rows=ROWS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one processor: a model on two ranks needs both."""
    with ray_nodes(1, 1) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The rows of two ranks without Ray."""
    job = two_ranks(tmp_path_factory.mktemp("one"), address=None)
    job.finish("out")
    return job.table("out").drop_columns(["cached_tokens"])


def raylet_of(process: psutil.Process) -> int:
    """The node of an actor."""
    (found,) = [each.pid for each in process.parents() if each.name() == "raylet"]
    return found


def ranks_of(job: TallyJob, process: Any) -> list[psutil.Process]:
    """Both ranks of a run, in the midst of its rows."""
    job.wait_for_line("out", process, "a replica is ready")
    ranks = [*replica_processes(), *rank_processes()]
    assert len(ranks) == 2 and len({raylet_of(each) for each in ranks}) == 2, ranks
    return ranks


def finished(job: TallyJob, process: Any, expected: Any) -> str:
    """What a run said that lost a replica and came to its end all the same."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert (summary["done"], summary["failed"], summary["duplicates"]) == (ROWS, 0, 0)
    assert "Traceback" not in err
    assert job.table("out").drop_columns(["cached_tokens"]).equals(expected)
    assert are_gone([*replica_processes(), *rank_processes()]), "an orphan"
    text: str = err
    return text


def test_a_replica_over_two_nodes_survives_the_death_of_a_rank(
    cluster: Any, one_machine: Any, tmp_path: Path
) -> None:
    """In exact mode its rows are those of two ranks on one machine."""
    job = two_ranks(tmp_path, cluster.address)
    process = job.start("out")
    ranks = ranks_of(job, process)
    (rank,) = rank_processes()
    os.kill(rank.pid, signal.SIGKILL)
    assert are_gone(ranks), "the other rank goes on"
    err = finished(job, process, one_machine)
    assert "of 2 parts of 1 CPU each" in err
    assert "LostPeer: rank 1 on " in err and "was lost (its process ended)" in err, err


def test_a_rank_on_another_node_that_hangs_is_noticed(cluster: Any, tmp_path: Path) -> None:
    """Of two attention groups, which swap rows between nodes."""
    alone = TallyJob(tmp_path, None, groups=2, rows=ROWS)
    alone.finish("alone")
    job = replace(alone, address=cluster.address)
    process = job.start("out")
    ranks = ranks_of(job, process)
    (rank,) = rank_processes()
    os.kill(rank.pid, signal.SIGSTOP)
    assert are_gone(ranks), "within 30 s"
    err = finished(job, process, alone.table("alone").drop_columns(["cached_tokens"]))
    assert "rank 1 has given no sign of life for 15 s" in err, err


def test_a_rank_that_dies_while_it_loads_is_begun_anew(
    cluster: Any, one_machine: Any, tmp_path: Path
) -> None:
    job = two_ranks(tmp_path, cluster.address)
    process = job.start("out")
    until_s = time.monotonic() + 200
    while not (ranks := rank_processes()):
        assert process.poll() is None and time.monotonic() < until_s, process.communicate()
        time.sleep(0.05)
    os.kill(ranks[0].pid, signal.SIGKILL)
    err = finished(job, process, one_machine)
    assert "ended while it loaded the model: rank 1 " in err, err


@pytest.mark.parametrize("of_rank", [0, 1])
def test_a_replica_that_loses_a_node_is_made_anew_on_another(
    one_machine: Any, tmp_path: Path, of_rank: int
) -> None:
    """Nodes beside a head that lends nothing, so that any of them can be taken away."""
    with ray_nodes(0) as cluster:
        nodes = [add_node(cluster, 1) for _ in range(2)]
        job = two_ranks(tmp_path, cluster.address)
        process = job.start("out")
        ranks = ranks_of(job, process)
        struck = raylet_of(ranks[of_rank])
        (lost,) = [each for each in nodes if struck in pids_of(each)]
        add_node(cluster, 1)
        cluster.remove_node(lost)
        assert are_gone(ranks), "within 30 s"
        finished(job, process, one_machine)


def pids_of(node: Any) -> set[int]:
    return {info.process.pid for infos in node.all_processes.values() for info in infos}


def test_ranks_on_all_nodes_end_with_a_run_that_is_killed(cluster: Any, tmp_path: Path) -> None:
    job = two_ranks(tmp_path, cluster.address)
    process = job.start("out")
    ranks = ranks_of(job, process)
    process.kill()
    process.communicate()
    assert are_gone(ranks), "an orphan"
    assert job.finish("out")["duplicates"] == 0
