"""The output folder of a job in an object store: whole objects, each by one atomic put.

Beside what a local folder holds: every run notes its parts in an object of its own,
`_batchmla/parts.<begin>-<run>.jsonl`, so that no run can undo what another one noted; log, samples
and heartbeat lie some seconds behind. Files in the making are on the local disk. A put that is done
twice, because its acknowledgement was lost, changes nothing.
"""

import errno
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchmla.errors import JobError, StorageError
from batchmla.jobs.remote import RemotePath
from batchmla.jobs.remote_calls import BRIEF, HURRIED_S, ONCE, PARTING, Patience, call, filesystem
from batchmla.jobs.remote_soft import SoftObjects
from batchmla.jobs.store import Store

_MISPLACED = {
    errno.ENOENT: "make the bucket",
    errno.EINVAL: "name a bucket and a folder in it",
    errno.ENOSYS: "name a store that can be written",
    errno.ENAMETOOLONG: "shorten it",
}


@contextmanager
def remote_errors(path: Path) -> Iterator[None]:
    """Turns a store's final fault about `path` into an error with the way out."""
    try:
        yield
    except OSError as error:
        words, way_out = error.strerror or str(error), _MISPLACED.get(error.errno or 0)
        if way_out is not None:
            raise JobError(
                f"output.path: {path} cannot be written: {words}; {way_out}, or choose another "
                f"output.path"
            ) from error
        raise StorageError(
            f"{path}: cannot write: {words}; let its owner permit it or give other credentials, "
            f"then run the same command again: finished rows are kept"
        ) from error


class RemoteStore(Store):
    """The writes of one run below one prefix of a store."""

    root: RemotePath
    own: RemotePath

    def __init__(self, root: Path, patience: Patience | None = None) -> None:
        assert isinstance(root, RemotePath), f"{root} is no place in an object store"
        super().__init__(root)
        run = secrets.token_hex(4)
        self.aside = Path(tempfile.gettempdir(), f"batchmla-{run}")
        self._patience = patience or Patience()
        self._run = f"{time.time_ns() // 10**6:013d}-{run}"
        self._lines: dict[Path, bytes] = {}  # by target: what this run has appended
        self._soft = SoftObjects(self._put_soft)

    def hurry(self, is_hurried: Callable[[], bool]) -> None:
        """From when that is true on a store that fails is given up sooner."""
        self._patience = replace(self._patience, is_hurried=is_hurried)

    def open(self) -> list[Path]:
        """Asks for the folder; returns our own one if it was not there."""
        with remote_errors(self.root):
            call(str(self.root), self._first_word, BRIEF)
            is_new = not self.own.entries()
        self.aside.mkdir(mode=0o700)
        self._soft.start()
        return [self.own] if is_new else []

    def _first_word(self) -> None:
        """Raises for a store or bucket that is not there, without a folder being needed."""
        with suppress(NotADirectoryError):
            try:
                self._system.ls(str(self.root))
            except FileNotFoundError as error:
                if _is_bucket_missing(error):
                    raise

    def close(self) -> None:
        """Takes the local folder for files in the making away."""
        self._soft.close()
        shutil.rmtree(self.aside, ignore_errors=True)

    def withdraw(self, made: Sequence[Path]) -> None:
        """Undoes what a run has written that was refused before it began."""
        for name in ("run.log", "lease"):
            self.remove(self.own / name)
        self._soft.close()

    def clean(self) -> None:
        """Nothing: what is half written has never been in the store."""

    def publish(self, name: str, target: Path) -> None:
        """Puts the finished file `aside`/`name` at `target`."""
        source = self.aside / name
        self.before("put", target, source)
        self._call(target, lambda: self._system.put_file(str(source), str(target)))
        source.unlink()

    def write(self, target: Path, data: bytes) -> None:
        """Replaces `target` by `data` as a whole."""
        self.before("put", target)
        self.put(target, data)

    def put(self, target: Path, data: bytes, patience: Patience | None = None) -> None:
        """The same, whoever has the lease."""
        self._call(target, lambda: self._system.pipe_file(str(target), data), patience)

    def write_soft(self, target: Path, data: bytes) -> None:
        """Replaces `target` as a whole, some seconds later."""
        self._soft.replace(target, data)

    def append(self, target: Path, line: bytes) -> None:
        """Adds one line to what this run has appended to `target`."""
        lines = self._lines.get(target, b"") + line
        self.before("append", target)
        self.put(target.with_name(f"{target.stem}.{self._run}{target.suffix}"), lines)
        self._lines[target] = lines

    def read_appended(self, target: Path) -> bytes:
        """The lines of all runs, in the order in which the runs began."""
        with remote_errors(target):
            return b"\n".join(path.read_bytes() for path in self._appended(target))

    def remove_appended(self, target: Path) -> None:
        """Deletes the lines of all runs."""
        with remote_errors(target):
            found = self._appended(target)
        for path in found:
            self.remove(path)
        self._lines.pop(target, None)

    def _appended(self, target: Path) -> list[RemotePath]:
        assert isinstance(target, RemotePath), target
        head, tail = f"{target.stem}.", target.suffix
        folder = RemotePath(target.parent)
        return sorted(
            path
            for path in folder.files()
            if path.name.startswith(head) and path.name.endswith(tail)
        )

    def append_soft(self, target: Path, data: bytes) -> None:
        """Adds `data` to the end of `target`, some seconds later."""

        def there() -> bytes:
            with remote_errors(target):
                try:
                    return target.read_bytes()
                except FileNotFoundError:
                    return b""

        self._soft.add(target, data, there)

    def flush_soft(self) -> None:
        """Puts what may be some seconds behind now, as far as the store takes it by then."""
        until_s = time.monotonic() + HURRIED_S
        while not self._soft.flush() and time.monotonic() < until_s:
            time.sleep(PARTING.first_wait_s)

    def remove(self, target: Path) -> None:
        """Deletes `target` if it is there."""
        self._soft.drop(target)
        self.before("remove", target)

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._system.rm_file(str(target))

        self._call(target, delete)

    def sync_folder(self, folder: Path) -> None:
        """Nothing: what the store has acknowledged is durable."""

    @property
    def _system(self) -> Any:
        return filesystem(str(self.root))

    def _put_soft(self, target: Path, data: bytes) -> None:
        self.before("put", target)
        self.put(target, data, ONCE)

    def _call(
        self, target: Path, action: Callable[[], object], patience: Patience | None = None
    ) -> None:
        with remote_errors(target):
            call(str(target), action, patience or self._patience)


def _is_bucket_missing(error: FileNotFoundError) -> bool:
    response = getattr(error.__cause__, "response", None) or {}
    return bool(response.get("Error", {}).get("Code") == "NoSuchBucket")


def store_at(root: Path) -> Store:
    """The store for an output folder of any place."""
    return RemoteStore(root) if isinstance(root, RemotePath) else Store(root)
