"""Files of the output folder that survive a power cut: written aside, synced, renamed.

Knows paths and bytes only. Every failure of the storage is a `StorageError` that names the file; a
place where no output can lie is a `JobError` that names output.path.
"""

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from batchmla.errors import JobError, StorageError

Effect = Literal["mkdir", "create", "sync", "rename", "append", "overwrite", "remove", "put"]

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EROFS: "the file system is read-only; make it writable",
    errno.EACCES: "permission is denied; change the owner or the mode",
    errno.EPERM: "the operation is not permitted; change the owner or the mode",
    errno.EIO: "the device reports an error; check it",
    errno.ESTALE: "the network share was remounted; check it",
}

_MISPLACED = {
    errno.EISDIR: "it is a folder where a file belongs; remove it",
    errno.ENOTDIR: "it lies below a file; remove that",
    errno.EEXIST: "a file is where a folder belongs; remove it",
    errno.ELOOP: "it is a link that leads round in a circle; remove it",
    errno.ENAMETOOLONG: "its name is too long for this file system; shorten it",
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an `OSError` about `path` into a `StorageError` with the way out."""
    try:
        yield
    except OSError as error:
        misplaced = _MISPLACED.get(error.errno or 0)
        if misplaced is not None:
            raise JobError(
                f"output.path: {_short(path)} cannot be written: {misplaced}, or choose another "
                f"output.path"
            ) from error
        words = f"{error.strerror or error}; make it writable"
        reason = _REASONS.get(error.errno or 0, words)
        raise StorageError(
            f"{path}: cannot write: {reason}, then run the same command again: "
            f"finished rows are kept"
        ) from error


def check_place(root: Path) -> None:
    """Refuses an output folder that cannot be made because of what lies on its way."""
    aside = _aside(root)
    for place in (*reversed(aside.parents), aside):
        if place.is_symlink() and not place.exists():
            raise JobError(
                f"output.path {_short(root)}: {place} is a link to {os.readlink(place)}, which "
                f"leads nowhere; make that folder, or choose another output.path"
            )
        if not place.exists():
            return
        if not place.is_dir():
            where = f"needs a folder {place}, which is a file"
            if place == root:
                where = "is a file"
            elif place in root.parents:
                where = f"lies below {place}, which is a file"
            raise JobError(
                f"output.path {_short(root)} {where}; remove that file, or choose another "
                f"output.path for a folder"
            )


def _aside(root: Path) -> Path:
    return root / "_batchmla" / "aside"


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:120]}… ({len(text):,} characters)"


class Store:
    """The writes of one run below one output folder.

    Files in the making lie in `aside`, a folder of this run alone on the same file system, where no
    reader looks. `before` is called ahead of every single effect on the disk, so that a run that
    has lost its output stops there, and tests can stop between any two.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.own = root / "_batchmla"
        self.aside = _aside(root) / secrets.token_hex(4)
        self.fence: Callable[[], None] | None = None  # raises when the output is no longer ours

    def before(self, effect: Effect, path: Path, source: Path | None = None) -> None:
        """Called ahead of each effect on `path`; `source` is what a rename moves there."""
        if self.fence is not None:
            self.fence()

    def open(self) -> list[Path]:
        """Makes the folders; returns those that were not there, the innermost first."""
        with storage_errors(self.root):
            check_place(self.root)
            made = [path for path in (self.aside, *self.aside.parents) if not path.exists()]
        with storage_errors(self.own):
            self.before("mkdir", self.aside)
            self.aside.mkdir(parents=True, exist_ok=True)
        return made

    def close(self) -> None:
        """Takes the folder for files in the making away, if nothing is left in it."""
        with suppress(OSError):
            self.aside.rmdir()

    def withdraw(self, made: Sequence[Path]) -> None:
        """Undoes `open` for a run that wrote no more than its lease and its log."""
        for name in ("run.log", "lease"):
            self.remove(self.own / name)
        for path in made:
            try:
                path.rmdir()
            except OSError:
                return  # somebody else has put something there

    def clean(self) -> None:
        """Removes what killed runs left half written; the caller holds the lease."""
        above = self.aside.parent
        with storage_errors(above):
            for path in above.iterdir():
                if not path.is_dir() or path.is_symlink():
                    self.remove(path)
                elif path != self.aside:
                    for inner in path.iterdir():
                        self.remove(inner)
                    path.rmdir()
            self.aside.mkdir(exist_ok=True)  # a run before may have cleaned it away

    def begin(self, name: str) -> Path:
        """Where the file `name` is to be written before it is published."""
        self.before("create", self.aside / name)
        return self.aside / name

    def publish(self, name: str, target: Path) -> None:
        """Moves the finished file `aside`/`name` to `target`, durable when this returns."""
        source = self.aside / name
        with storage_errors(target):
            self._sync(source)
            self.before("rename", target, source)
            os.replace(source, target)
            self._sync(target.parent)

    def write(self, target: Path, data: bytes) -> None:
        """Replaces `target` by `data` as a whole."""
        with storage_errors(target):
            self.begin(target.name).write_bytes(data)
        self.publish(target.name, target)

    def write_soft(self, target: Path, data: bytes) -> None:
        """Replaces `target` as a whole, without waiting for the disk: for heartbeats."""
        with storage_errors(target):
            source = self.begin(f"{target.name}.soft")
            source.write_bytes(data)
            self.before("rename", target, source)
            os.replace(source, target)

    def overwrite(self, descriptor: int, target: Path, data: bytes) -> None:
        """Puts `data` over the first bytes of the open file `target`, without waiting."""
        with storage_errors(target):
            self.before("overwrite", target)
            os.pwrite(descriptor, data, 0)

    def append(self, target: Path, line: bytes) -> None:
        """Adds one line to `target`, durable when this returns."""
        with storage_errors(target):
            is_new = not target.exists()
            self.before("append", target)
            with target.open("ab") as file:
                file.write(line)
            self._sync(target)
            if is_new:
                self._sync(target.parent)

    def read_appended(self, target: Path) -> bytes:
        """The lines that all runs have added to `target` by `append`, none where it is missing."""
        with storage_errors(target):
            return target.read_bytes() if target.exists() else b""

    def remove_appended(self, target: Path) -> None:
        """Deletes what `append` has made of `target`."""
        self.remove(target)

    def append_soft(self, target: Path, data: bytes) -> None:
        """Adds `data` to the end of `target`, without waiting for the disk."""
        with storage_errors(target):
            self.before("append", target)
            with target.open("ab") as file:
                file.write(data)

    def remove(self, target: Path) -> None:
        """Deletes `target` if it is there; durable after `sync_folder`."""
        with storage_errors(target):
            self.before("remove", target)
            target.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Makes deletions in `folder` durable."""
        with storage_errors(folder):
            self._sync(folder)

    def _sync(self, path: Path) -> None:
        self.before("sync", path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
