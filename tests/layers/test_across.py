"""What attention groups hold together gives every group what one rank alone gives it."""

from pathlib import Path

import pytest
import torch
from common_layers import FEATURES, VOCAB, WIDTH, Case, Layers, pieces, run_on_ranks
from common_layers import rows_of as rows
from common_layers import tokens_of as tokens

from batchmla.layers.across import PIECE_ROWS, piece_rows
from batchmla.layers.across import pieces as pieces_of_rows
from batchmla.parallel import Par
from batchmla.placement import Placement

CASES = [Case(1, 4), Case(2, 2), Case(1, 4, unit=32), Case(1, 4, is_whole=True), Case(4, 1)]


def test_every_group_gets_what_one_rank_gives_it(tmp_path: Path) -> None:
    """One group has no rows and serves, one has more than go out at once."""
    alone = Layers(Par.single(), 1)
    alone.fill(Placement(), 1)
    num_compared = 0
    for rank, by_case in enumerate(run_on_ranks(tmp_path, CASES)):
        for case, found in zip(CASES, by_case, strict=True):
            place = case.place(rank)
            check_shapes(case, found.shapes)
            check_calls(case, place, found.calls)
            if not found.outputs:
                assert not len(tokens(place.group))
                continue
            expected = {
                "embed": alone.embed.forward(tokens(place.group)),
                "dense": alone.dense.forward(rows(place.group)),
                "gated": alone.gated.forward(rows(place.group)),
                "head": alone.head.forward(rows(place.group)[:3]),
            }
            assert found.outputs.keys() == expected.keys()
            assert torch.equal(found.outputs["embed"], expected["embed"]), "rows are only moved"
            for name, whole in expected.items():
                torch.testing.assert_close(found.outputs[name], whole, rtol=1e-5, atol=1e-5)
                num_compared += 1
    assert num_compared == 4 * (3 + 2 + 3 + 3 + 4)


def check_shapes(case: Case, shapes: dict[str, tuple[int, ...]]) -> None:
    """All ranks hold everything once; 96 features are no four units of 32."""
    tensor, groups = case.tensor, 1 if case.is_whole else case.groups
    assert shapes["embed.weight"] == (VOCAB // tensor, WIDTH // groups)
    assert shapes["head.weight"] == (VOCAB // (tensor * groups), WIDTH)
    cut = FEATURES // tensor if case.unit == 32 else FEATURES // (tensor * groups)
    for name in ("dense", "gated"):
        assert shapes[f"{name}.up.weight"] == (2 * cut, WIDTH)
        assert shapes[f"{name}.down.weight"] == (WIDTH, cut)


def check_calls(case: Case, place: Placement, calls: dict[str, int]) -> None:
    """Two pieces of each of two dense layers where group 2 takes part."""
    if case.groups == 1 or case.is_whole:
        assert not {"to all", "back"} & calls.keys()
        return
    dense = 0 if case.unit == 32 else 2 * (2 if case.groups == 4 else 1)
    assert calls["to all"] == calls["back"] == 2 + dense
    served = not len(tokens(place.group))
    assert calls.get("sum", 0) == (3 if case.tensor > 1 and not served else 0)
    assert calls.get("gather", 0) == (1 if case.tensor > 1 and not served else 0)


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_hold_every_value_once(case: Case) -> None:
    """In the vocabulary's order: groups first, then the ranks of one."""
    num_ranks = case.tensor * case.groups
    counts: dict[str, torch.Tensor] = {}
    owner = torch.full((VOCAB,), -1)
    for rank in range(num_ranks):
        place = case.place(rank)
        for piece in pieces(place, case.unit):
            held = counts.setdefault(piece.source, torch.zeros(piece.shape, dtype=torch.int64))
            held[piece.slices] += 1
            if piece.source == "head":
                owner[piece.slices[0]] = place.tensor_rank * case.groups + place.group
    for source, held in counts.items():
        is_repeated = case.is_whole or (case.unit == 32 and source not in ("embed", "head"))
        assert (held == (case.groups if is_repeated else 1)).all(), source
    if not case.is_whole:
        assert owner.tolist() == sorted(owner.tolist()) and owner.max() == num_ranks - 1


def test_a_tied_head_stays_whole_with_its_embedding() -> None:
    layers = Layers(Par(Placement(tensor=2, attention_data=2)), 1, is_tied=True)
    assert layers.embed.weight.shape == layers.head.weight.shape == (VOCAB // 2, WIDTH)
    assert layers.dense.up.weight.shape == (2 * FEATURES // 4, WIDTH)
    layers.embed.serve(torch.float32, torch.device("cpu"))  # nothing to serve: no one is called
    layers.head.serve(torch.float32, torch.device("cpu"))


def test_pieces_cover_all_rows_and_are_bounded() -> None:
    counts = (5, 0, 3 * PIECE_ROWS, PIECE_ROWS // 4)
    found = list(pieces_of_rows(counts))
    assert [sum(each) for each in zip(*(part for _, part in found), strict=True)] == list(counts)
    assert all(sum(part) <= PIECE_ROWS for _, part in found)
    assert [first for first, _ in found] == [at * piece_rows(4) for at in range(12)]
    assert piece_rows(2 * PIECE_ROWS) == 1


def test_rows_that_were_not_told_are_a_fault() -> None:
    par = Par(Placement(attention_data=2))
    layers = Layers(par, 1)
    par.group_rows = (3, 1)
    with pytest.raises(AssertionError, match=r"2 rows, told were \(3, 1\)"):
        layers.head.forward(torch.zeros(2, WIDTH))
