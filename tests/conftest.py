"""What holds for every test."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command line sets logging up for its process, which here goes on with other tests."""
    root, ours = logging.getLogger(), logging.getLogger("batchmla")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before
