"""`_batchmla/run.log`: what the package logs while a job runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchmla.jobs.store import storage_errors


@contextmanager
def run_log(output: Path) -> Iterator[None]:
    """Adds the file to the package's loggers inside `with`; other handlers stay as they are."""
    path = output / "_batchmla" / "run.log"
    with storage_errors(path):
        handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("batchmla")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, logging.INFO) if level else logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
