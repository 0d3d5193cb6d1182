"""Hyper-connection weights in the interpreter against float64."""

import pytest
import torch
from triton_case import error

from batchmla.kernels.reference.hybrid import hyper_weights as plain
from batchmla.kernels.triton.hyper import hyper_weights

F32 = 1e-6


@pytest.mark.parametrize(("tokens", "streams", "rounds"), [(1, 4, 20), (37, 4, 20), (5, 3, 2),
                                                           (3, 2, 0), (0, 4, 20)])  # fmt: skip
def test_weights(tokens: int, streams: int, rounds: int) -> None:
    width = streams * (streams + 2)
    mixed = torch.randn(tokens, width + 5)[:, :width] * 3
    base, scale = torch.randn(width), torch.rand(3) + 0.5
    found = hyper_weights(mixed, base, scale, streams, rounds, 1e-6)
    wanted = plain(mixed.double(), base.double(), scale.double(), streams, rounds, 1e-6)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32 and error(one, other) <= F32


def test_rows_and_columns_add_up_to_one() -> None:
    mixed = torch.randn(9, 24)
    _, _, mix = hyper_weights(mixed, torch.zeros(24), torch.ones(3), 4, 20, 1e-6)
    assert (mix.sum(1) - 1).abs().max() < 1e-4 and (mix.sum(2) - 1).abs().max() < 1e-3


def test_a_token_does_not_depend_on_others() -> None:
    mixed, base, scale = torch.randn(40, 24), torch.randn(24), torch.rand(3)
    whole = hyper_weights(mixed, base, scale, 4, 20, 1e-6)
    alone = hyper_weights(mixed[35:36], base, scale, 4, 20, 1e-6)
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one[35:36], other)
