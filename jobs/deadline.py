"""A run that was told to stop ends in time, even while its object store hangs."""

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from batchmla.errors import ExitCode
from batchmla.jobs.remote_store import RemoteStore
from batchmla.jobs.store import Store

LIMIT_S = 9.0  # from the signal: a scheduler's patience is 10 s
_LOOK_S = 0.25


class Deadline:
    """Ends the process `limit_s` after `is_stopping` became true inside `with`, whatever waits.

    A request that a store neither answers nor refuses cannot be called back. What it should have
    saved is lost as in a crash: those rows are done again by the next run. Local files are waited
    for, as no library lies between them and us.
    """

    def __init__(
        self, store: Store, is_stopping: Callable[[], bool], limit_s: float = LIMIT_S
    ) -> None:
        self._store = store
        self._is_stopping = is_stopping
        self._limit_s = limit_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)

    def __enter__(self) -> Self:
        if isinstance(self._store, RemoteStore):
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()

    def _watch(self) -> None:
        stopped_s: float | None = None
        while not self._ended.wait(_LOOK_S):
            now_s = time.monotonic()
            if stopped_s is None:
                stopped_s = now_s if self._is_stopping() else None
            elif now_s - stopped_s > self._limit_s:
                words = (
                    f"{self._store.root}: the store does not answer; ended without saving the "
                    "last rows: run the same command again when it does\n"
                )
                os.write(2, words.encode(errors="replace"))
                os._exit(ExitCode.STORAGE)
