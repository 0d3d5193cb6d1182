"""What a replica's driver makes of a cluster that fails it. Without Ray's processes."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from batchmla.errors import DeviceError
from batchmla.jobs.replicas_worker import Patience, Worker

pytest.importorskip("ray")
nobody: Any = None


def worker() -> Worker:
    return Worker(
        "replica 7",
        make=nobody, shape=nobody, backlog=nobody, foreman=nobody, patience=Patience(look_s=0.01),
    )  # fmt: skip


def test_a_cluster_that_is_gone_ends_the_run_as_a_device_does() -> None:
    def wait(seconds: float) -> bool:
        raise ValueError("Placement group 5d39 does not exist.")

    async def place() -> None:
        one = worker()
        one._group = SimpleNamespace(wait=wait)
        await one._wait_for_process()

    with pytest.raises(DeviceError, match=r"forgotten replica 7 .*5d39.*the same command goes on"):
        asyncio.run(place())


def test_a_death_while_it_starts_stays_the_replicas_own() -> None:
    from ray.exceptions import ActorDiedError

    async def die() -> str:
        raise ActorDiedError

    async def place() -> None:
        one = worker()
        one._group = SimpleNamespace(wait=lambda seconds: True)
        one._actor = SimpleNamespace(process=SimpleNamespace(remote=die))
        await one._wait_for_process()

    with pytest.raises(ActorDiedError):
        asyncio.run(place())
