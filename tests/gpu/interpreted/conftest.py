"""Before the first launch."""

import pytest
import torch
import triton_interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same numbers in every run, for each test alone."""
    torch.manual_seed(0)
