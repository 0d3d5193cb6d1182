"""Objects that may be some seconds behind: log, samples and heartbeat of a run in a store.

A store cannot add to an object, so each is kept in memory and replaced as a whole every so often. A
replacement that fails is left for the next one: nothing here is needed to go on with the job.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from batchmla.errors import BatchmlaError

EVERY_S = 10.0
MAX_BYTES = 4 << 20  # of one object; of a longer one the end is kept

_LOG = logging.getLogger(__name__)


class SoftObjects:
    """Filled by any thread; `put` is called by one at a time."""

    def __init__(self, put: Callable[[Path, bytes], None], every_s: float = EVERY_S) -> None:
        self._put = put
        self._every_s = every_s
        self._content: dict[Path, bytes] = {}
        self._dirty: set[Path] = set()
        self._lock = threading.Lock()
        self._puts = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soft", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def replace(self, target: Path, data: bytes) -> None:
        """`target` is to be `data`."""
        with self._lock:
            self._content[target] = data
            self._dirty.add(target)

    def add(self, target: Path, data: bytes, there: Callable[[], bytes]) -> None:
        """`target` is to end in `data`; `there` reads what it was before this run."""
        with self._lock:
            is_known = target in self._content
        before = b"" if is_known else there()
        with self._lock:
            content = self._content.get(target, before) + data
            if len(content) > MAX_BYTES:
                content = content[content.find(b"\n", len(content) - MAX_BYTES // 2) + 1 :]
            self._content[target] = content
            self._dirty.add(target)

    def drop(self, target: Path) -> None:
        """Nothing more of `target`."""
        with self._lock:
            self._content.pop(target, None)
            self._dirty.discard(target)

    def flush(self) -> bool:
        """Puts what has changed, up to the first that the store does not take; true: all of it."""
        with self._puts:
            while (due := self._next()) is not None:
                target, data = due
                try:
                    self._put(target, data)
                except (BatchmlaError, OSError) as error:
                    _LOG.debug("%s is not up to date: %s", target, error)
                    with self._lock:
                        if target in self._content:
                            self._dirty.add(target)
                    return False
        return True

    def _next(self) -> tuple[Path, bytes] | None:
        with self._lock:
            if not self._dirty:
                return None
            target = min(self._dirty)
            self._dirty.remove(target)
            return target, self._content[target]

    def close(self) -> None:
        """Ends the thread and leaves everything as it lies in the store."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._dirty.clear()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.flush()
