"""The lease: one run at a time in an output folder.

A lock of the operating system on `_batchmla/lease`, so that it ends with its process however that
ends, and a heartbeat in the file: a holder not heard of for a minute is taken to be dead (stopped,
or behind a lost network), and finds out before it next writes. The file names the holder for the
message to the second run. Whatever slips through, the merge of segments keeps every row single.

`_batchmla/lease`: one JSON object with host, pid, since_s and beat_s (seconds since the epoch),
filled up with blanks; blank when the run has ended.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from batchmla.errors import BatchmlaError
from batchmla.jobs.holder import STALE_S, Holder, in_use, lease_path, taken_over
from batchmla.jobs.remote import RemotePath
from batchmla.jobs.remote_lease import RemoteLease, remote_holder
from batchmla.jobs.remote_store import RemoteStore
from batchmla.jobs.store import Store, storage_errors

_BEAT_S = 5.0
_WAIT_S = 0.5  # for those who only look at the lock
_WATCH_S = 12.0  # clocks of two hosts may differ: a stale holder is watched for two beats first
_FILE_BYTES = 512
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

_LOG = logging.getLogger(__name__)

__all__ = ["STALE_S", "Holder", "Lease", "is_held", "lease_of", "lease_path"]


def lease_of(store: Store, is_stopping: Callable[[], bool]) -> "Lease | RemoteLease":
    """The lease for an output folder of any place, to be held with `with`."""
    return RemoteLease(store, is_stopping) if isinstance(store, RemoteStore) else Lease(store)


class Lease:
    """Held from `with` to its end; the store is then fenced by `require`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._output = store.root
        self._path = lease_path(store.root)
        self._descriptor: int | None = None
        self._since_s = time.time()
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Self:
        with self._one_at_a_time():
            self._descriptor = self._take()
            try:
                self._stamp()
            except BaseException:
                os.close(self._descriptor)
                raise
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
        assert self._descriptor is not None, "the lease is entered before it is left"
        try:
            with suppress(BatchmlaError):
                self._store.overwrite(self._descriptor, self._path, b" " * _FILE_BYTES)
        finally:
            self._store.fence = None
            os.close(self._descriptor)
            self._descriptor = None

    def require(self) -> None:
        """Raises a `JobError` when another run has taken the lease over."""
        assert self._descriptor is not None, "a lease is required within `with`"
        try:
            there = os.stat(self._path)
            is_ours = os.path.samestat(there, os.fstat(self._descriptor))
        except FileNotFoundError:
            is_ours = False
        except OSError:
            return  # the write itself will meet this
        if not is_ours:
            raise taken_over(self._output)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Runs that start at the same moment take turns."""
        with storage_errors(self._path):
            folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            with suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _take(self) -> int:
        """The open file of the lease, locked where locks exist."""
        until_s = time.monotonic() + _WAIT_S
        while True:
            with storage_errors(self._path):
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            holder = _read_holder(descriptor)
            has_locks, is_free = _lock(descriptor)
            if not has_locks:
                _LOG.warning(
                    "%s: this file system has no locks; the heartbeat alone keeps runs apart",
                    self._path,
                )
                is_free = holder is None
            if is_free:
                return descriptor
            is_silent = holder is not None and holder.is_stale and _is_silent(descriptor)
            os.close(descriptor)
            if is_silent:
                _LOG.warning("%s: taken over from a silent run (%s)", self._output, holder)
                self._store.remove(self._path)
            elif time.monotonic() > until_s or not has_locks:
                raise in_use(self._output, holder)
            else:
                time.sleep(_WAIT_S / 5)

    def _stamp(self) -> None:
        own = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since_s": self._since_s,
            "beat_s": time.time(),
        }
        assert self._descriptor is not None, "a lease is stamped within `with`"
        data = json.dumps(own).encode().ljust(_FILE_BYTES)
        self._store.overwrite(self._descriptor, self._path, data)

    def _beat(self) -> None:
        """The heartbeat; a missed beat is no fault of the run."""
        while not self._ended.wait(_BEAT_S):
            try:
                self._stamp()
            except BatchmlaError as error:
                _LOG.warning("no heartbeat: %s", error)


def is_held(output: Path) -> bool:
    """Whether a run works in `output` now."""
    if isinstance(output, RemotePath):
        found = remote_holder(output)
        return found is not None and not found.is_stale
    try:
        descriptor = os.open(lease_path(output), os.O_RDONLY)
    except OSError:
        return False
    try:
        holder = _read_holder(descriptor)
        has_locks, is_free = _lock(descriptor, fcntl.LOCK_SH)
        if has_locks:
            return not is_free
        return holder is not None and not holder.is_stale
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> tuple[bool, bool]:
    """(whether there are locks here, whether this one was to be had)."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True, False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False, False
    return True, True


def _is_silent(descriptor: int) -> bool:
    """Whether no beat comes for a while."""
    first, until_s = os.pread(descriptor, _FILE_BYTES, 0), time.monotonic() + _WATCH_S
    while os.pread(descriptor, _FILE_BYTES, 0) == first:
        if time.monotonic() > until_s:
            return True
        time.sleep(_WAIT_S / 5)
    return False


def _read_holder(descriptor: int) -> Holder | None:
    """Who names itself in the open file."""
    try:
        raw = json.loads(os.pread(descriptor, _FILE_BYTES, 0))
        age_s = time.time() - float(raw["beat_s"])
        return Holder(str(raw["host"]), int(raw["pid"]), age_s)
    except (OSError, ValueError, KeyError, TypeError):
        return None
