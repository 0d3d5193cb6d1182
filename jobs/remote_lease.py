"""The lease in an object store: an object that names its holder and is renewed every few seconds.

A store has no locks, so this lease is advisory: it keeps runs apart that start after each other. Of
two that write at once for a while each keeps its own segments, and the merge takes every row once.
A run that finds a holder waits until that one gives a sign of life, and is refused, or has been
silent for a minute, and is followed; a holder whose process has ended on this machine at once.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from batchmla.errors import BatchmlaError, JobError
from batchmla.jobs.holder import STALE_S, Holder, in_use, lease_path, taken_over
from batchmla.jobs.remote import RemotePath
from batchmla.jobs.remote_calls import BRIEF, ONCE, PARTING, Patience
from batchmla.jobs.remote_store import RemoteStore, remote_errors
from batchmla.jobs.signals import StopRun

BEAT_S = 10.0
_LOOK_S = 1.0
_WATCH_S = 25.0  # clocks may differ: two beats must have been missed

_LOG = logging.getLogger(__name__)


class RemoteLease:
    """Held from `with` to its end; the store is then fenced by `require`."""

    def __init__(
        self, store: RemoteStore, is_stopping: Callable[[], bool], beat_s: float = BEAT_S
    ) -> None:
        self._store = store
        self._path = RemotePath(lease_path(store.root))
        self._is_stopping = is_stopping
        self._beat_s = beat_s
        self._key = secrets.token_hex(8)
        self._since_s = time.time()
        self._is_lost = False
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="lease", daemon=True)
        store.hurry(is_stopping)

    def __enter__(self) -> Self:
        there = _read(self._path)
        if there is not None:
            self._outlast(there)
        self._stamp(BRIEF)
        now = _read(self._path)
        if now is None or now["key"] != self._key:
            raise self._in_use(now)
        self._store.fence = self.require
        self._beats.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._beats.join()
        if not self._is_lost:
            self._store.flush_soft()
            try:
                if self._is_ours(PARTING):
                    self._store.remove(self._path)
            except (BatchmlaError, OSError) as fault:
                _LOG.warning("%s is left behind: %s", self._path, fault)
        self._store.fence = None

    def require(self) -> None:
        """Raises a `JobError` when another run is known to have taken the lease over."""
        if self._is_lost:
            raise taken_over(self._store.root)

    def _outlast(self, first: dict[str, Any]) -> None:
        """Returns when the holder is taken to be dead; raises when it lives."""
        holder = _holder_of(first)
        is_here = first["place"] is not None and first["place"] == _place()
        if is_here and not psutil.pid_exists(holder.pid):
            _LOG.info("%s: goes on after a run that has died (%s)", self._store.root, holder)
            return
        wait_s = min(STALE_S, max(_WATCH_S, STALE_S - holder.age_s))
        until_s = time.monotonic() + wait_s
        _LOG.info(
            "%s: another run has it (%s); waiting %.0f s at most for a sign of life",
            self._store.root,
            holder,
            wait_s,
        )
        while time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            if self._is_stopping():
                raise StopRun
            now = _read(self._path)
            if now is None:
                return
            if now != first:
                raise self._in_use(now)
        _LOG.warning("%s: taken over from a silent run (%s)", self._store.root, holder)

    def _in_use(self, raw: dict[str, Any] | None) -> JobError:
        return in_use(self._store.root, None if raw is None else _holder_of(raw))

    def _stamp(self, patience: Patience) -> None:
        own = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since_s": self._since_s,
            "beat_s": time.time(),
            "key": self._key,
            "place": _place(),
        }
        self._store.put(self._path, json.dumps(own).encode(), patience)

    def _is_ours(self, patience: Patience) -> bool:
        there = _read(self._path, patience)
        return there is not None and there["key"] == self._key

    def _beat(self) -> None:
        """The heartbeat; a missed beat is no fault of the run."""
        while not self._ended.wait(self._beat_s):
            try:
                if not self._is_ours(ONCE):
                    self._is_lost = True
                    return
                self._stamp(ONCE)
            except (BatchmlaError, OSError) as error:
                _LOG.warning("no heartbeat: %s", error)


def remote_holder(output: RemotePath) -> Holder | None:
    """Who names itself in the lease of an output folder."""
    try:
        found = _read(RemotePath(lease_path(output)))
    except BatchmlaError:
        return None
    return None if found is None else _holder_of(found)


def _read(path: RemotePath, patience: Patience = BRIEF) -> dict[str, Any] | None:
    """What the lease says; None where there is none that can be read."""
    with remote_errors(path):
        try:
            raw = json.loads(path.fetch(patience))
        except (FileNotFoundError, ValueError):
            return None
    wanted = {"host": str, "pid": int, "beat_s": float, "key": str, "place": str | None}
    is_whole = isinstance(raw, dict) and all(
        name in raw and isinstance(raw[name], kind) for name, kind in wanted.items()
    )
    return raw if is_whole else None


def _holder_of(raw: dict[str, Any]) -> Holder:
    return Holder(raw["host"], raw["pid"], time.time() - raw["beat_s"])


def _place() -> str | None:
    """What tells the processes of this machine, or container, from all others; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
