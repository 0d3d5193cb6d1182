"""`_batchmla/run.log`: what the package logs while a job runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchmla.jobs.remote_store import RemoteStore
from batchmla.jobs.store import Store, storage_errors

_ONLY_FILE = "batchmla.jobs.runlog.only"  # what is logged under this name is not for the console


class _LogFile(logging.FileHandler):
    """Lines that a full or failing disk does not take are lost, and nothing else: what the job
    writes will meet the same disk and say so."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _LogObject(logging.Handler):
    """The same in an object store, which gets the lines some seconds later."""

    def __init__(self, store: RemoteStore, path: Path) -> None:
        super().__init__()
        self._store = store
        self._path = path
        store.append_soft(path, b"")  # what earlier runs wrote is read now

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record) + "\n"
        self._store.append_soft(self._path, line.encode(errors="replace"))


def _handler(store: Store) -> logging.Handler:
    path = store.own / "run.log"
    if isinstance(store, RemoteStore):
        return _LogObject(store, path)
    with storage_errors(path):
        return _LogFile(path, encoding="utf-8")


@contextmanager
def run_log(store: Store) -> Iterator[None]:
    """Adds the file to the package's loggers inside `with`; other handlers stay as they are."""
    handler = _handler(store)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("batchmla")
    level = logger.level
    logger.addHandler(handler)
    only = logging.getLogger(_ONLY_FILE)
    only.propagate = False
    only.addHandler(handler)
    logger.setLevel(min(level, logging.INFO) if level else logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        only.removeHandler(handler)
        handler.close()


def log_only(level: int, message: str) -> None:
    """A line of the open run.log that the console does not show, as somebody else says it there."""
    logging.getLogger(_ONLY_FILE).log(level, "%s", message)
