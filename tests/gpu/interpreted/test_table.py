"""The back end as a whole: what is loaded, and what is refused by name."""

import pytest

from batchmla import kernels


def test_it_is_loaded_by_name() -> None:
    ops = kernels.load("triton")
    assert ops.name == "triton"
    assert ops.norm.__module__ == "batchmla.kernels.triton.norm"


def test_an_exact_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'triton' has no exact form; cpu has one"):
        kernels.load("triton", exact=True)
