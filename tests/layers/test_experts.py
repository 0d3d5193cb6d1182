"""Experts spread over ranks in every way that a placement allows: the sums of one rank."""

import pytest
import torch
from spread_layer import (
    ACTIVE,
    EXPERTS,
    WIDTH,
    Found,
    Sizes,
    make_layer,
    run_on_ranks,
    tokens_of,
)

from batchmla.layers import experts as experts_module
from batchmla.layers.experts import row_bytes
from batchmla.parallel import Par
from batchmla.placement import Placement

PLACEMENTS: list[Sizes] = [
    (4, 1, 1), (4, 4, 1), (1, 1, 4), (1, 4, 4), (2, 1, 2), (2, 2, 2), (2, 4, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[bool, list[Found]]]:
    return run_on_ranks(tmp_path_factory.mktemp("ranks"), PLACEMENTS)


def places_of(rank: int) -> list[Placement]:
    return [
        Placement(tensor=tensor, expert=expert, attention_data=groups, rank=rank)
        for tensor, expert, groups in PLACEMENTS
    ]


def test_every_placement_gives_the_sums_of_one_rank(
    ranks: list[dict[bool, list[Found]]],
) -> None:
    """Of its own tokens to each attention group; one has none and only serves. In exact mode, with
    whole experts and groups of one rank, bit for bit."""
    alone = {exact: make_layer(Par.single(), exact=exact) for exact in (False, True)}
    num_compared = 0
    for rank, found in enumerate(ranks):
        for exact, outputs in found.items():
            for place, each in zip(places_of(rank), outputs, strict=True):
                x_TM = tokens_of(place.group)
                assert each.out_TM.shape == x_TM.shape
                if not len(x_TM):
                    continue
                expected_TM, num_compared = alone[exact].forward(x_TM), num_compared + 1
                if exact and place.tensor == 1 and place.expert == place.attention_data:
                    assert torch.equal(each.out_TM, expected_TM), place
                torch.testing.assert_close(each.out_TM, expected_TM, rtol=1e-5, atol=1e-5)
    assert num_compared == 2 * (4 + 4 + 3 + 3 + 2 + 2 + 2)


def rows_between(group: int, place: Placement, *, exact: bool) -> int:
    """Of a group's tokens those that have experts on a rank; in exact mode all such choices."""
    x_TM = tokens_of(group)
    if not len(x_TM):
        return 0
    ids_TA = make_layer(Par.single()).router.forward(x_TM)[1]
    mine = place.expert_ids(EXPERTS)
    is_there_TA = (ids_TA >= mine.start) & (ids_TA < mine.stop)
    return int(is_there_TA.sum() if exact else is_there_TA.any(dim=1).sum())


def test_a_row_goes_once_to_each_rank_and_one_sum_comes_back(
    ranks: list[dict[bool, list[Found]]],
) -> None:
    """Bytes by the routing itself: out for other groups' experts, and back of their tokens. In
    exact mode each choice goes by itself."""
    num_saved = 0
    for rank, found in enumerate(ranks):
        for exact, outputs in found.items():
            for place, each in zip(places_of(rank), outputs, strict=True):
                others = [g for g in range(place.attention_data) if g != place.group]
                out, back, choices = (
                    sum(rows_between(place.group, place.at_group(g), exact=exact) for g in others),
                    sum(rows_between(g, place, exact=exact) for g in others),
                    sum(rows_between(place.group, place.at_group(g), exact=True) for g in others),
                )
                sent = row_bytes(WIDTH, 1 if exact else ACTIVE, 4)
                assert each.row_bytes == out * sent + back * WIDTH * 4, (place, exact)
                assert each.calls == (2 if others else 0)
                num_saved += choices - out
    assert num_saved > 50, "tokens had several experts with the same rank"


def test_a_router_of_groups_bounds_how_many_ranks_a_token_reaches() -> None:
    """Two of four groups of experts are kept, each of which is one rank's."""
    for group in (0, 2, 3):
        reached = [
            rows_between(group, Placement(expert=4, attention_data=4, rank=rank), exact=False)
            for rank in range(4)
        ]
        assert 0 < sum(reached) <= 2 * len(tokens_of(group))


@pytest.mark.parametrize("piece", [1, 4, 7])
def test_many_choices_are_computed_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x_TM = make_layer(Par.single()), tokens_of(2)
    weights_TA, ids_TA = layer.router.forward(x_TM)
    ids_TA = ids_TA.where(ids_TA < 5, -1)  # the others are foreign
    num_rows: list[int] = []

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(x))
        return layer._run(x, weights, ids)

    whole_TM = experts_module._run_own(run, x_TM, weights_TA, ids_TA)
    (num_choices,) = num_rows
    assert num_choices == int((ids_TA >= 0).sum()) > 7
    num_rows.clear()
    monkeypatch.setattr(experts_module, "PIECE_CHOICES", piece)
    found_TM = experts_module._run_own(run, x_TM, weights_TA, ids_TA)
    torch.testing.assert_close(found_TM, whole_TM, rtol=1e-6, atol=1e-6)
    assert len(num_rows) == -(-num_choices // piece) and max(num_rows) == piece


def test_what_is_chosen_is_counted_where_experts_are_dealt() -> None:
    alone = make_layer(Par.single())
    alone.forward(tokens_of(0))
    assert int(alone.spread.chosen.sum()) == 0, "one rank has them all"
