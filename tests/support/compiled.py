"""The compiled kernels of this machine."""

import pytest

from batchmla import kernels
from batchmla.kernels.ops import Ops


def compiled_ops() -> Ops:
    """Skips the test where the machine has none."""
    made = kernels.load("cpu")
    if made.name.startswith("cpu by torch"):
        pytest.skip(made.name)
    return made
