"""The lease: one run at a time in an output folder.

A lock of the operating system on `_batchmla/lease`, so that it ends with its process however that
ends. The file names the holder, for the message to the second run.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from batchmla.errors import JobError
from batchmla.jobs.store import storage_errors

_LOG = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def lease_path(output: Path) -> Path:
    return output / "_batchmla" / "lease"


class Lease:
    """Held from `with` to its end."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._path = lease_path(output)
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        with storage_errors(self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            raise JobError(
                f"{self._output} is in use by another run ({_describe(holder)}); wait for it or "
                f"stop it, or choose another output.path"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            _LOG.warning("%s: this file system has no locks; start one run at a time", self._path)
        self._descriptor = descriptor
        own = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        with storage_errors(self._path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(own).encode(), 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_held(output: Path) -> bool:
    """Whether a run works in `output` now."""
    try:
        descriptor = os.open(lease_path(output), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _describe(holder: bytes) -> str:
    try:
        raw = json.loads(holder)
        return f"host {raw['host']}, pid {raw['pid']}"
    except (ValueError, KeyError, TypeError):
        return "it has not named itself yet"
