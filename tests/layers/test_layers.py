"""Blocks find their weights; rotation stretches as published."""

import math

import pytest
import torch

from batchmla import kernels
from batchmla.attention.mla import MlaForms, is_expansion_cheaper
from batchmla.errors import DeviceError, JobError
from batchmla.kernels.ops import MlaDims
from batchmla.layers.block import Block, Weight
from batchmla.layers.linear import ColLinear
from batchmla.layers.rope import Rope, RopeKind, RopeSpec, yarn_magnitude
from batchmla.parallel import Par
from batchmla.placement import Placement


def test_weights_are_named_by_their_place() -> None:
    class Leaf(Block):
        def __init__(self) -> None:
            self.weight = Weight(2, 3)
            self.bias = None

    class Tree(Block):
        def __init__(self) -> None:
            self.layers = (Leaf(), Leaf())
            self.own = Weight(4)

    assert [name for name, _ in Tree().named_weights()] == [
        "layers.0.weight", "layers.1.weight", "own",
    ]  # fmt: skip
    assert Weight(2, 3).numel == 6
    assert not Weight(2, 3).is_filled


def test_a_cut_that_leaves_a_rest_is_refused() -> None:
    par = Par(Placement(tensor=4))
    with pytest.raises(JobError, match=r"10 output features .* over 4 devices"):
        ColLinear(par, kernels.load("reference"), 8, 10)


def test_a_rank_without_peers_cannot_communicate() -> None:
    x = torch.ones(2)
    assert Par.single().sum(x) is x and Par.single().gather(x) is x
    with pytest.raises(AssertionError, match="no process group"):
        Par(Placement(tensor=2)).sum(x)


def test_a_peer_that_never_comes_is_a_device_error(tmp_path: object) -> None:
    with pytest.raises(DeviceError, match="rank 1 of 2 could not join"):
        Par.connect(Placement(tensor=2, rank=1), tmp_path / "store", timeout_s=0.5)  # type: ignore


@pytest.mark.parametrize(
    ("theta", "original", "factor", "low", "high"),
    [(1e4, 4096, 40.0, 10, 23), (1.6e5, 65536, 16.0, 15, 25)],
)
def test_yarn_ramp_of_published_models(
    theta: float, original: int, factor: float, low: int, high: int
) -> None:
    spec = RopeSpec(
        width=64, theta=theta, kind=RopeKind.YARN, factor=factor, original_positions=original
    )
    plain = RopeSpec(width=64, theta=theta).frequencies()
    ratio = plain / spec.frequencies()
    torch.testing.assert_close(ratio[: low + 1], torch.ones(low + 1))
    torch.testing.assert_close(ratio[high:], torch.full((32 - high,), factor))
    middle = ratio[low + 1 : high]
    assert ((middle > 1) & (middle < factor)).all()


def test_magnitudes_of_published_models() -> None:
    assert yarn_magnitude(40, 1.0) == pytest.approx(1.368888, abs=1e-6)
    assert yarn_magnitude(40, 0.707) == pytest.approx(1.260804, abs=1e-6)
    assert yarn_magnitude(1.0, 1.0) == 1.0


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    spec = RopeSpec(width=16, theta=1e4, kind=RopeKind.LLAMA3, factor=8.0, original_positions=64)
    ratio = RopeSpec(width=16, theta=1e4).frequencies() / spec.frequencies()
    assert (ratio == 1).sum() == 1 and (ratio > 7.99).sum() == 5
    assert ((ratio > 1.01) & (ratio < 7.99)).sum() == 2


def test_angles_of_far_positions() -> None:
    cos, sin = Rope(RopeSpec(width=8, theta=1e4)).at(torch.tensor([0, 3, 163_839]))
    assert cos.shape == sin.shape == (3, 4) and cos.dtype == torch.float32
    assert cos[1, 0].item() == pytest.approx(math.cos(3), abs=1e-6)
    assert sin[2, 1].item() == pytest.approx(math.sin(16_383.9), abs=2e-3)


def test_forms_break_even_where_the_multiply_adds_do() -> None:
    v3 = MlaDims(heads=128, nope=128, rope=64, value=128, latent=512, scale=1.0)
    queries = torch.arange(1, 400).numpy()
    context = queries + 100_000
    is_expanded = is_expansion_cheaper(queries, context, v3)
    first = int(queries[is_expanded.argmax()])
    # 512 * 256 to expand a key, 1088 - 320 saved by every query that sees it
    assert first == pytest.approx(512 * 256 / (1088 - 320), abs=2)
    assert is_expanded[first:].all() and not is_expanded[: first - 1].any()
    assert [*MlaForms] == ["cheapest", "absorbed", "expanded"]
