"""Choice of experts against the specification, and of equals against the lowest ids."""

import pytest
import torch

from batchmla.kernels.ops import RouterDims, Scoring
from batchmla.kernels.reference.hybrid import route_scores as expected_scores
from batchmla.kernels.reference.moe import route as expected_route
from batchmla.kernels.triton.router import Router, choose, route_scores

DIMS = {
    "softmax": (64, RouterDims(active=6, normalise=False, scale=1.0, scoring=Scoring.SOFTMAX)),
    "softmax in groups": (
        20,
        RouterDims(
            active=3, normalise=False, scale=16.0, groups=4, kept_groups=2, group_best=1,
            scoring=Scoring.SOFTMAX,
        ),
    ),
    "sigmoid in groups": (
        256, RouterDims(active=8, normalise=True, scale=2.5, groups=8, kept_groups=4),
    ),
    "sigmoid, groups of one": (
        6, RouterDims(active=2, normalise=True, scale=1.0, groups=6, kept_groups=3),
    ),
    "sigmoid of many": (384, RouterDims(active=8, normalise=True, scale=2.8)),
    "all": (3, RouterDims(active=3, normalise=True, scale=1.0)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("has_bias", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("name", DIMS)
def test_choice(name: str, has_bias: bool, dtype: torch.dtype) -> None:
    num_experts, dims = DIMS[name]
    x, weight = torch.randn(4, 48).bfloat16(), torch.randn(num_experts, 48) / 7
    bias = torch.randn(num_experts) / 5 if has_bias else None
    weights, ids = Router().route(x.to(dtype), weight, bias, dims)
    wanted_weights, wanted_ids = expected_route(x, weight, bias, dims)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert torch.equal(ids, wanted_ids)  # both in falling order
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-7)


def test_scores_are_exact_at_both_ends() -> None:
    logits = torch.tensor([[-80.0, -20.0, -5.0, 0.0, 3.0, 60.0, 1e4, -0.01]]).repeat(2, 1)
    given = torch.arange(8).repeat(2, 1)
    weights, ids = route_scores(logits, None, given, 8, 1.5)
    wanted, _ = expected_scores(logits.double(), None, given, 8, 1.5)
    assert torch.equal(ids, given)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("has_bias", [False, True])
def test_root_of_softplus(has_bias: bool) -> None:
    logits, bias = torch.randn(5, 48), torch.randn(48) if has_bias else None
    weights, ids = route_scores(logits, bias, None, 6, 1.5)
    wanted_weights, wanted_ids = expected_scores(logits, bias, None, 6, 1.5)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-7)


def test_of_equals_the_lowest() -> None:
    dims = RouterDims(active=3, normalise=True, scale=1.0)
    _, ids = choose(torch.zeros(2, 40), None, dims)
    assert ids.tolist() == [[0, 1, 2]] * 2
    limited = RouterDims(active=3, normalise=True, scale=1.0, groups=4, kept_groups=1)
    _, ids = choose(torch.zeros(2, 40), None, limited)
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_what_is_no_number_harms_its_row_only() -> None:
    logits = torch.randn(3, 16)
    dims = RouterDims(active=4, normalise=True, scale=1.0, groups=4, kept_groups=2)
    alone, ids_alone = choose(logits, None, dims)
    logits[1] = float("nan")
    weights, ids = choose(logits, None, dims)
    assert torch.equal(weights[::2], alone[::2]) and torch.equal(ids[::2], ids_alone[::2])
    assert len(set(ids[1].tolist())) == 4 and ids[1].min() >= 0 and ids[1].max() < 16
    assert weights[1].isnan().all()


def test_one_score_that_is_no_number_is_chosen_last() -> None:
    logits = torch.randn(1, 8)
    logits[0, 5] = float("nan")
    weights, ids = choose(logits, None, RouterDims(active=7, normalise=False, scale=1.0))
    assert 5 not in ids and weights.isfinite().all()
    weights, _ = choose(logits, None, RouterDims(active=8, normalise=False, scale=1.0))
    assert weights[0, 7].isnan()


def test_a_row_does_not_depend_on_others() -> None:
    num_experts, dims = DIMS["sigmoid in groups"]
    logits, bias = torch.randn(6, num_experts), torch.randn(num_experts)
    weights, ids = choose(logits, bias, dims)
    alone, ids_alone = choose(logits[2:3], bias, dims)
    assert torch.equal(weights[2:3], alone) and torch.equal(ids[2:3], ids_alone)


def test_no_tokens() -> None:
    weights, ids = choose(torch.empty(0, 8), None, RouterDims(active=2, normalise=True, scale=1.0))
    assert weights.shape == ids.shape == (0, 2)
