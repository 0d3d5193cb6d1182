"""The connection to Ray: to a cluster that is there, or to one on this machine.

All of it happens in one thread that lives as long as the connection: processes that Ray starts here
end with that thread, even if this process is killed; and Ray leaves the signals of the run alone,
as it sets its own in the main thread only.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from batchmla.errors import DeviceError, JobError
from batchmla.jobs.replicas_shape import Node

T = TypeVar("T")


class NoCluster(Exception):
    """None is there to be joined."""


_LOOK_S = 0.2
_JOIN_S = 8.0
_START_TRIES = 3  # its helpers give up after 15 s on a machine that is busy or reads from afar
_START_S = 30
_STORE_BYTES = 256 << 20  # prompts and completions on their way
_LOG = logging.getLogger(__name__)


def require_ray(address: str) -> None:
    """Raises for what can be known to be wrong without Ray."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise JobError(
            'executor.kind: ray needs the package ray; run pip install "batchmla[ray]"'
        ) from None
    if "://" in address:
        raise JobError(
            f"executor.address: {address} is a Ray client's address; run batchmla on a node of the "
            "cluster (for example by ray job submit) with executor.address: auto, or give the "
            "cluster's HOST:PORT"
        )


class Cluster:
    """A connection; use `close` at the end."""

    def __init__(self, address: str, here: Node | None = None) -> None:
        """`address`: auto (one that is there, else raises `NoCluster`) or HOST:PORT, which raises
        `DeviceError` where none answers. With `here` a cluster is started on this machine instead,
        lending so much.
        """
        self._address = address
        self._here = here
        self._loop = asyncio.new_event_loop()
        self._connected: Future[None] = Future()
        self._is_borrowed = False
        self._thread = threading.Thread(target=self._serve, name="ray", daemon=True)
        self._thread.start()
        try:
            _result(self._connected)
        except BaseException:
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
        """Runs `work` in the connection's thread and waits for it; may be interrupted. Raises
        `TimeoutError` after `limit_s`.
        """
        return _result(asyncio.run_coroutine_threadsafe(work, self._loop), limit_s)

    def post(self, work: Any, *args: Any) -> None:
        """Has the connection's thread call `work` soon."""
        self._loop.call_soon_threadsafe(work, *args)

    def close(self) -> None:
        """Ends the connection, and the cluster if it was started here."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._connect()
            self._connected.set_result(None)
        except BaseException as error:
            self._connected.set_exception(error)
            return
        import ray

        try:
            self._loop.run_forever()
        finally:
            if not self._is_borrowed:
                ray.shutdown()

    def _connect(self) -> None:
        import ray

        said: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._here is not None:
            _start(self._here, said)
        elif ray.is_initialized():  # this program's own connection, which stays
            self._is_borrowed = True
        else:
            _join(self._address, said)


def _join(address: str, said: dict[str, Any]) -> None:
    import ray

    try:
        ray.init(address=address, **said)
    except Exception as error:
        reason = _reason(error)
        if address == "auto" and isinstance(error, ConnectionError) and "multiple" not in reason:
            raise NoCluster(reason) from error
        raise DeviceError(
            f"executor.address: {address}: no Ray cluster can be joined there ({reason}); start "
            "it, give the HOST:PORT of another, or local to start one on this machine"
        ) from error


def _start(here: Node, said: dict[str, Any]) -> None:
    import ray
    from ray._common.usage.usage_lib import set_usage_stats_enabled_via_env_var

    set_usage_stats_enabled_via_env_var(False)  # a job tells nobody that it runs
    for tries_left in reversed(range(_START_TRIES)):
        try:
            ray.init(
                address="local",
                num_cpus=here.num_cpus,
                num_gpus=here.num_gpus,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                _system_config={"raylet_start_wait_time_s": _START_S},
                **said,
            )
            return
        except Exception as error:
            ray.shutdown()
            if not tries_left:
                reason = _reason(error)
                raise DeviceError(f"Ray cannot be started on this machine: {reason}") from error
            _LOG.warning("Ray did not start in time; it is tried again")


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def nodes() -> list[Node]:
    """The living nodes. In the connection's thread."""
    import ray

    found = []
    for each in ray.nodes():
        if each["Alive"]:
            lent = each["Resources"]
            found.append(Node(num_cpus=int(lent.get("CPU", 0)), num_gpus=int(lent.get("GPU", 0))))
    return found


def is_alive(node_id: str) -> bool:
    """Whether a node is known to live. Where Ray is connected."""
    import ray

    return any(each["Alive"] and each["NodeID"] == node_id for each in ray.nodes())


def _result(future: "Future[T]", limit_s: float | None = None) -> T:
    """Waits in short steps, so that a signal is seen; gives the work up if it is left."""
    until_s = None if limit_s is None else time.monotonic() + limit_s
    try:
        while not future.done():
            wait((future,), _LOOK_S)
            if until_s is not None and time.monotonic() > until_s:
                raise TimeoutError
        return future.result()
    except BaseException:
        future.cancel()
        raise
