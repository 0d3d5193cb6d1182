"""Both routers against float64 formulas: groups, bias, ties, scores that vanish."""

import pytest
import torch
from compare import assert_close

from batchmla import kernels
from batchmla.kernels.ops import Ops, RouterDims, Scoring

TOKENS, EXPERTS, WIDTH = 17, 24, 20


@pytest.fixture(params=["cpu", "torch", "reference"], scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return kernels.load(request.param)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def dims_of(scoring: Scoring = Scoring.SIGMOID, active: int = 3, **changes: object) -> RouterDims:
    best = 2 if scoring is Scoring.SIGMOID else 1
    fields = {"normalise": True, "scale": 2.5, "group_best": best} | changes
    return RouterDims(active=active, scoring=scoring, **fields)  # type: ignore[arg-type]


def scores_of(x: torch.Tensor, weight: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    logits_TE = x.double() @ weight.double().T
    return logits_TE.sigmoid() if scoring is Scoring.SIGMOID else logits_TE.softmax(dim=1)


def dense(weights_TA: torch.Tensor, ids_TA: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The weight of every expert, in order: what the sum over experts sees."""
    weights_TE = torch.zeros(len(ids_TA), num_experts, dtype=weights_TA.dtype)
    return weights_TE.scatter_add_(1, ids_TA, weights_TA)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3), (24, 5)], ids=str)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("scoring", list(Scoring))
@pytest.mark.parametrize("best", [1, 2])
def test_route_follows_the_bias_and_weighs_by_the_scores(
    ops: Ops, groups: tuple[int, int], normalise: bool, has_bias: bool, scoring: Scoring, best: int
) -> None:
    dims = dims_of(
        scoring, groups=groups[0], kept_groups=groups[1], normalise=normalise, group_best=best
    )
    x, weight = random(TOKENS, WIDTH), random(EXPERTS, WIDTH, seed=1)
    # all choices negative: a masked expert at 0 would win
    bias = random(EXPERTS, seed=2, scale=0.5) - 2 if has_bias else None
    weights, ids = ops.route(x, weight, bias, dims)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    scores = scores_of(x, weight, scoring)
    choice = scores if bias is None else scores + bias.double()
    in_group = EXPERTS // groups[0]
    for token in range(TOKENS):
        ranked = choice[token].view(groups[0], in_group).sort(descending=True).values
        group_scores = ranked[:, :best].sum(1)
        kept = set(group_scores.argsort(descending=True)[: groups[1]].tolist())
        allowed = [e for e in range(EXPERTS) if e // in_group in kept]
        chosen = sorted(allowed, key=lambda e: -choice[token, e])[:3]
        assert sorted(ids[token].tolist()) == sorted(chosen)
        expected = scores[token, ids[token]]
        if normalise:
            expected = expected / expected.sum()
        assert_close("weights", weights[token], expected * 2.5)


@pytest.mark.parametrize("scoring", list(Scoring))
def test_a_bias_changes_the_choice_and_no_weight(ops: Ops, scoring: Scoring) -> None:
    x, weight = random(TOKENS, WIDTH), random(EXPERTS, WIDTH, seed=1)
    bias = torch.zeros(EXPERTS)
    bias[[3, 11, 20]] = 5.0
    dims = dims_of(scoring, normalise=False, scale=1.0)
    weights, ids = ops.route(x, weight, bias, dims)
    assert (ids.sort(dim=1).values == torch.tensor([3, 11, 20])).all()
    assert_close("weights", weights, scores_of(x, weight, scoring).gather(1, ids))
    _, unbiased = ops.route(x, weight, None, dims)
    assert (ids != unbiased).any(dim=1).float().mean() > 0.9


@pytest.mark.parametrize("scoring", list(Scoring))
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)], ids=str)
def test_ties_choose_different_experts_of_the_same_score(
    ops: Ops, scoring: Scoring, groups: tuple[int, int]
) -> None:
    x = random(TOKENS, WIDTH)
    weight = random(6, WIDTH, seed=1).repeat(4, 1)  # expert e equals e % 6
    dims = dims_of(scoring, active=7, groups=groups[0], kept_groups=groups[1], normalise=False)
    weights, ids = ops.route(x, weight, torch.zeros(EXPERTS), dims)
    scores = scores_of(x, weight, scoring)
    for token in range(TOKENS):
        assert len(set(ids[token].tolist())) == 7
        in_group = EXPERTS // groups[0]
        assert len({expert // in_group for expert in ids[token].tolist()}) <= groups[1]
        allowed = scores[token, : in_group * groups[1]]  # every group has the same scores
        expected = allowed.sort(descending=True).values[:7] * 2.5
        assert_close("weights", weights[token].sort(descending=True).values, expected)


@pytest.mark.parametrize("normalise", [True, False])
def test_groups_masked_with_zero_give_the_same_sum(ops: Ops, normalise: bool) -> None:
    """DeepSeek-V2's own mask, also where softmax leaves nothing to the experts it allows."""
    dims = dims_of(Scoring.SOFTMAX, groups=4, kept_groups=2, normalise=normalise, scale=16.0)
    x = random(TOKENS, WIDTH)
    x[::2] *= 60  # nearly all scores underflow to 0 in float32
    weight = random(EXPERTS, WIDTH, seed=1)
    weights, ids = ops.route(x, weight, None, dims)
    scores = scores_of(x, weight, Scoring.SOFTMAX).float()
    assert ((scores > 0).sum(dim=1) < 3).any()
    best = scores.view(TOKENS, 4, 6).amax(dim=2)
    kept = torch.zeros(TOKENS, 4).scatter_(1, best.topk(2, dim=1).indices, 1)
    masked = (scores.view(TOKENS, 4, 6) * kept[:, :, None]).flatten(1).double()
    top, chosen = masked.topk(3, dim=1)
    if normalise:
        top = top / (top.sum(dim=1, keepdim=True) + 1e-20)
    expected = dense(top * 16, chosen, EXPERTS)
    assert_close("weights", dense(weights, ids, EXPERTS), expected, scale=4)
