"""Files of the output folder that survive a power cut: written aside, synced, renamed.

Knows paths and bytes only. Every failure of the storage is a `StorageError` that names the file.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchmla.errors import StorageError

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EROFS: "the file system is read-only; make it writable",
    errno.EACCES: "permission is denied; change the owner or the mode",
    errno.EPERM: "the operation is not permitted; change the owner or the mode",
    errno.EIO: "the device reports an error; check it",
    errno.ESTALE: "the network share was remounted; check it",
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an `OSError` about `path` into a `StorageError` with the way out."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise StorageError(
            f"{path}: cannot write: {reason}, then run the same command again: "
            f"finished rows are kept"
        ) from error


class Store:
    """The writes of one run below one output folder.

    Files in the making lie in `aside`, on the same file system, where no reader looks. Tests
    subclass this to stop between any two operations.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.own = root / "_batchmla"
        self.aside = self.own / "aside"

    def open(self) -> None:
        """Makes the folders."""
        with storage_errors(self.own):
            self.aside.mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Removes what a killed run left half written; the caller holds the lease."""
        with storage_errors(self.aside):
            for path in self.aside.iterdir():
                path.unlink()

    def publish(self, name: str, target: Path) -> None:
        """Moves the finished file `aside`/`name` to `target`, durable when this returns."""
        source = self.aside / name
        with storage_errors(target):
            self._sync(source)
            os.replace(source, target)
            self._sync(target.parent)

    def write(self, target: Path, data: bytes) -> None:
        """Replaces `target` by `data` as a whole."""
        with storage_errors(target):
            (self.aside / target.name).write_bytes(data)
        self.publish(target.name, target)

    def write_soft(self, target: Path, data: bytes) -> None:
        """Replaces `target` as a whole, without waiting for the disk: for heartbeats."""
        with storage_errors(target):
            source = self.aside / f"{target.name}.soft"
            source.write_bytes(data)
            os.replace(source, target)

    def append(self, target: Path, line: bytes) -> None:
        """Adds one line to `target`, durable when this returns."""
        with storage_errors(target):
            is_new = not target.exists()
            with target.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                self._sync(target.parent)

    def remove(self, target: Path) -> None:
        """Deletes `target` if it is there."""
        with storage_errors(target):
            target.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Makes deletions in `folder` durable."""
        with storage_errors(folder):
            self._sync(folder)

    def _sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
