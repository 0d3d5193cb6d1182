"""Field cases of the router: biases of any sign and size, all settings of groups."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from compare import assert_close

from batchmla import kernels
from batchmla.kernels.ops import Ops, RouterDims, Scoring

TOKENS, EXPERTS, WIDTH = 9, 24, 16
# groups, kept groups, active experts: every group holds two, as their best two rank it
SETTINGS = [
    (groups, kept, active)
    for groups in (1, 2, 3, 4, 6, 8, 12)
    for kept in {1, max(1, groups // 2), groups}
    for active in {1, 2, EXPERTS // groups * kept}
]
BIASES = {"any": (-12.0, 12.0), "negative": (-12.0, -1.0), "small": (-0.1, 0.1)}


@pytest.fixture(params=["cpu", "torch", "reference"], scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return kernels.load(request.param)


def choose(choice: Sequence[float], groups: int, kept: int, active: int) -> list[int]:
    """The chosen experts: groups by the sum of their best two, the others at -inf."""
    size = len(choice) // groups
    best = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    keeps = sorted(range(groups), key=lambda g: -best[g])[:kept]
    masked = [each if e // size in keeps else -math.inf for e, each in enumerate(choice)]
    return sorted(range(len(choice)), key=lambda e: -masked[e])[:active]


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("normalise", [True, False])
def test_fc_133_groups_are_masked_and_the_bias_only_chooses(
    ops: Ops, bias: str, normalise: bool
) -> None:
    source = torch.Generator().manual_seed(len(bias))
    for groups, kept, active in SETTINGS:
        x_TM = torch.randn(TOKENS, WIDTH, generator=source)
        weight_EM = torch.randn(EXPERTS, WIDTH, generator=source)
        low, high = BIASES[bias]
        bias_E = low + (high - low) * torch.rand(EXPERTS, generator=source)
        dims = RouterDims(
            active=active, groups=groups, kept_groups=kept, normalise=normalise, scale=2.5,
            scoring=Scoring.SIGMOID, group_best=2,
        )  # fmt: skip
        weights_TA, ids_TA = ops.route(x_TM, weight_EM, bias_E, dims)
        scores_TE = (x_TM.double() @ weight_EM.double().T).sigmoid()
        for token in range(TOKENS):
            choice = (scores_TE[token] + bias_E.double()).tolist()
            wanted = choose(choice, groups, kept, active)
            assert sorted(ids_TA[token].tolist()) == sorted(wanted), (groups, kept, active)
            expected = scores_TE[token, ids_TA[token]]
            if normalise:
                expected = expected / expected.sum()
            assert_close("weights", weights_TA[token], expected * 2.5)


def test_the_slow_choice_differs_where_masked_scores_are_zero() -> None:
    """With negative choices a mask of zeros lets experts of other groups win: the settings above
    would show it."""
    source = random.Random(0)
    choice = [source.uniform(-12, -1) for _ in range(EXPERTS)]
    right = choose(choice, 4, 2, 3)
    size = EXPERTS // 4
    best = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(4)]
    keeps = sorted(range(4), key=lambda g: -best[g])[:2]
    zeroed = [each if e // size in keeps else 0.0 for e, each in enumerate(choice)]
    wrong = sorted(range(EXPERTS), key=lambda e: -zeroed[e])[:3]
    assert not set(right) & set(wrong)
