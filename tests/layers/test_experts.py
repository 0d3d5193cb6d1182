"""Experts spread over ranks in every way that a placement allows: the sums of one rank."""

from pathlib import Path

import torch
from spread_layer import Sizes, make_layer, run_on_ranks, tokens_of

from batchmla.parallel import Par
from batchmla.placement import Placement

PLACEMENTS: list[Sizes] = [
    (4, 1, 1), (4, 4, 1), (1, 1, 4), (1, 4, 4), (2, 1, 2), (2, 2, 2), (2, 4, 2),
]  # fmt: skip


def test_every_placement_gives_the_sums_of_one_rank(tmp_path: Path) -> None:
    """Of its own tokens to each attention group; one has none and only serves. In exact mode, with
    whole experts and groups of one rank, bit for bit."""
    alone = {exact: make_layer(Par.single(), exact=exact) for exact in (False, True)}
    num_compared = 0
    for rank, found in enumerate(run_on_ranks(tmp_path, PLACEMENTS)):
        for exact, outputs in found.items():
            for (tensor, expert, groups), out_TM in zip(PLACEMENTS, outputs, strict=True):
                place = Placement(tensor=tensor, expert=expert, attention_data=groups, rank=rank)
                x_TM = tokens_of(place.group)
                assert out_TM.shape == x_TM.shape
                if not len(x_TM):
                    continue
                expected_TM, num_compared = alone[exact].forward(x_TM), num_compared + 1
                if exact and tensor == 1 and expert == groups:
                    assert torch.equal(out_TM, expected_TM), place
                torch.testing.assert_close(out_TM, expected_TM, rtol=1e-5, atol=1e-5)
    assert num_compared == 2 * (4 + 4 + 3 + 3 + 2 + 2 + 2)


def test_what_is_chosen_is_counted_where_experts_are_dealt() -> None:
    alone = make_layer(Par.single())
    alone.forward(tokens_of(0))
    assert int(alone.spread.chosen.sum()) == 0, "one rank has them all"
