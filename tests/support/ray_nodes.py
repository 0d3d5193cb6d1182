"""A Ray cluster whose nodes are processes of this machine."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.cluster_utils import Cluster

_STORE_BYTES = 80 << 20
_PORTS = (
    "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)  # fmt: skip
_PATIENCE = "RAY_raylet_start_wait_time_s"


@contextmanager
def ray_nodes(*num_cpus: int) -> Iterator[Cluster]:
    """One node each, the first is the head. It waits long for a busy machine."""
    before = os.environ.get(_PATIENCE)
    os.environ[_PATIENCE] = "120"
    cluster = Cluster()
    try:
        for count in num_cpus:
            add_node(cluster, count)
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.pop(_PATIENCE)
        if before is not None:
            os.environ[_PATIENCE] = before


def add_node(cluster: Cluster, num_cpus: int) -> Any:
    return cluster.add_node(
        num_cpus=num_cpus,
        num_gpus=0,
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        **_free_ports(),
    )


def _free_ports() -> dict[str, int]:
    """Given ports, a node does not wait for its helpers, which take long on a busy machine."""
    sockets = [socket.socket() for _ in _PORTS]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return {name: each.getsockname()[1] for name, each in zip(_PORTS, sockets, strict=True)}
    finally:
        for each in sockets:
            each.close()
