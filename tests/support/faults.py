"""A store that dies, fails or loses what was not synced at its k-th effect on the disk.

Effects are counted from 1; `at` 0 never strikes. Death inside the process is a `SystemExit` from
that effect and every later one, so that no clean-up code can write; SIGKILL is the real thing.
"""

import errno
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from batchmla.errors import StorageError
from batchmla.jobs.store import Effect, Store

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)


class QuickStore(Store):
    """Syncs in name only: what a lost sync would lose is `PowerStore`'s business."""

    def _sync(self, path: Path) -> None:
        self.before("sync", path)


class FaultStore(QuickStore):
    """Calls `strike(store, path)` before its `at`-th effect; it may raise, kill, or do nothing."""

    def __init__(
        self, root: Path, at: int, strike: "Callable[[FaultStore, Effect, Path], None]"
    ) -> None:
        super().__init__(root)
        self.count = 0
        self.is_dead = False
        self.at = at
        self.struck: str | None = None
        self._strike = strike
        self._lock = threading.Lock()

    def before(self, effect: Effect, path: Path, source: Path | None = None) -> None:
        super().before(effect, path, source)
        with self._lock:
            if self.is_dead:
                raise self._end()
            self.count += 1
            if self.count == self.at:
                self.struck = f"{effect} {path.name}"
                try:
                    self._strike(self, effect, path)
                except SystemExit as end:
                    raise self._end() from end
            self.note(effect, path, source)

    @staticmethod
    def _end() -> BaseException:
        """What ends a thread: those that only tell how far the run is are not to be heard."""
        is_aside = threading.current_thread().name in ("progress", "lease")
        return StorageError("dead") if is_aside else SystemExit("dead")

    def note(self, effect: Effect, path: Path, source: Path | None) -> None:
        """For those who remember."""


def die(store: FaultStore, effect: Effect, path: Path) -> None:
    """The process ends here, as far as its writes go."""
    store.is_dead = True
    raise SystemExit("dead")


def die_torn(store: FaultStore, effect: Effect, path: Path) -> None:
    """Of a file about to be synced only half has reached the disk."""
    if effect == "sync" and path.is_file():
        os.truncate(path, path.stat().st_size // 2 if path.suffix != ".jsonl" else cut_line(path))
    die(store, effect, path)


def cut_line(path: Path) -> int:
    """The length of a file of lines with its last one cut."""
    return max(0, path.stat().st_size - 40)


def kill(store: FaultStore, effect: Effect, path: Path) -> None:
    """SIGKILL to this process, with a torn file where one is in the making."""
    if effect == "sync" and path.is_file():
        os.truncate(path, path.stat().st_size // 2 if path.suffix != ".jsonl" else cut_line(path))
    os.kill(os.getpid(), signal.SIGKILL)


def failing(number: int) -> Callable[[FaultStore, Effect, Path], None]:
    """This effect fails with an `OSError`, once."""

    def strike(store: FaultStore, effect: Effect, path: Path) -> None:
        raise OSError(number, os.strerror(number))

    return strike


class PowerStore(FaultStore):
    """At its `at`-th effect the power goes: what was not synced by then is lost.

    A file's bytes are lost beyond their half unless the file was synced; names made, moved and
    removed in a folder are undone, newest first, unless the folder was synced. `dice` None loses
    all of that, else as much of the end as they say.
    """

    def __init__(self, root: Path, at: int, dice: random.Random | None = None) -> None:
        super().__init__(root, at, lambda store, effect, path: self._go_dark())
        self._dice = dice
        self._copies = root.parent / f"{root.name}.copies-{self.aside.name}"
        self._num_copies = 0
        self._unsynced: list[tuple[Path, Callable[[], None]]] = []  # (what syncs it, undoing)
        self._dirty: set[Path] = set()

    def note(self, effect: Effect, path: Path, source: Path | None) -> None:
        if effect == "create":
            self._dirty.add(path)
        elif effect == "sync":
            self._dirty.discard(path)
            self._unsynced = [each for each in self._unsynced if each[0] != path]
        elif effect == "rename":
            assert source is not None
            if source in self._dirty:
                self._dirty.remove(source)
                self._dirty.add(path)
            self._unsynced.append((path.parent, self._restoring(path)))
        elif effect == "remove" and path.exists():
            self._unsynced.append((path.parent, self._restoring(path)))
        elif effect == "append":
            if not path.exists():
                self._unsynced.append((path.parent, lambda: path.unlink(missing_ok=True)))
            else:
                length = path.stat().st_size
                self._unsynced.append((path, lambda: os.truncate(path, length)))

    def _restoring(self, path: Path) -> Callable[[], None]:
        """What brings the present state of the name `path` back."""
        if not path.exists():
            return lambda: path.unlink(missing_ok=True)
        self._copies.mkdir(exist_ok=True)
        self._num_copies += 1
        copy = self._copies / str(self._num_copies)
        os.link(path, copy)
        return lambda: os.replace(copy, path)

    def _go_dark(self) -> None:
        for path in self._dirty:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        kept = 0 if self._dice is None else self._dice.randint(0, len(self._unsynced))
        for _, undo in reversed(self._unsynced[kept:]):
            undo()
        self.is_dead = True
        raise SystemExit("dead")
