"""How many ranks a token's experts are on, against draws and against every choice there is."""

from itertools import combinations

import pytest
import torch
from live_bytes import LiveBytes
from published import DEEPSEEK_R1
from tiny import raw_config

from batchmla import kernels
from batchmla.engine import routed as routed_module
from batchmla.engine.routed import Choice, RoutedRows, routed_rows
from batchmla.layers import experts as experts_module
from batchmla.layers.experts import PIECE_CHOICES, SpreadExperts
from batchmla.parallel import Par
from batchmla.placement import Placement

R1 = Choice(num_experts=256, active=8, groups=8, kept=4)


def holders_of(choice: Choice, holders: int) -> list[int]:
    """For every way to keep router groups and choose experts, with how many holders those are."""
    size, held = choice.num_experts // choice.groups, choice.num_experts // holders
    counts = []
    for kept in combinations(range(choice.groups), choice.kept):
        experts = [group * size + each for group in kept for each in range(size)]
        for chosen in combinations(experts, choice.active):
            counts.append(len({expert // held for expert in chosen}))
    return counts


@pytest.mark.parametrize("holders", [1, 2, 4, 8])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (2, 1), (4, 3)])
def test_reach_is_the_mean_of_all_choices(groups: int, kept: int, holders: int) -> None:
    choice = Choice(num_experts=8, active=2, groups=groups, kept=kept)
    counts = holders_of(choice, holders)
    assert holders * choice.reached(holders) == pytest.approx(sum(counts) / len(counts))
    assert choice.most_holders(holders) == max(counts)


def test_reach_of_r1_by_draws() -> None:
    """Of 8 ranks one for each router group: at most the 4 that are kept."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(20_000, 8, generator=generator).topk(4).indices
    is_kept = torch.zeros(20_000, 8).scatter_(1, kept, 1.0).repeat_interleave(32, dim=1)
    chosen = (torch.rand(20_000, 256, generator=generator) * is_kept).topk(8).indices // 32
    reached = torch.zeros(20_000, 8).scatter_(1, chosen, 1.0).sum(dim=1)
    assert 8 * R1.reached(8) == pytest.approx(float(reached.mean()), rel=0.005)
    assert 8 * R1.reached(8) == pytest.approx(3.6, rel=0.02)
    assert R1.most_holders(8) == int(reached.max()) == 4
    assert R1.most_holders(16) == 8 and R1.most_holders(2) == 2 and R1.reached(1) == 1


def test_the_most_rows_of_a_rank_by_hand() -> None:
    """Of R1 in eight groups of 100 tokens: 400 rows go, 800 may come, each with eight choices."""
    place = Placement(expert=8, attention_data=8)
    rows = RoutedRows(choice=R1, width=7168, features=2048, placement=place)
    packed, width = 2 * 7168 + 64, 7168
    computed = 6400 * (3 * width + 2048) * 2 + 800 * 4 * width
    assert rows.nbytes(100, 2) == 800 * packed + computed
    many = 10 * PIECE_CHOICES
    summed = 8 * many * (packed + 4 * width + 2 * width)  # more than a piece: the sums in bfloat16
    assert rows.nbytes(many, 2) == summed, "choices in pieces"
    tensor = RoutedRows(choice=R1, width=7168, features=256, placement=Placement(tensor=8))
    assert tensor.nbytes(100, 2) == (800 * (256 + width) + 100 * width) * 2


def test_shapes_of_a_rank() -> None:
    ops = kernels.load("reference")
    for place, features in (
        (Placement(tensor=8), 256),
        (Placement(expert=8, attention_data=8), 2048),
        (Placement(tensor=2, expert=4, attention_data=4), 1024),
    ):
        assert routed_rows(DEEPSEEK_R1, place, ops) == RoutedRows(
            choice=R1, width=7168, features=features, placement=place
        )
    assert routed_rows(raw_config("llama"), Placement(), ops) is None
    for name in ("qwen3_moe", "minimax_m2", "minimax_m3", "v4", "kimi_linear"):
        found = routed_rows(raw_config(name), Placement(expert=2, attention_data=2), ops)
        assert found is not None and 0 < found.choice.active < found.choice.num_experts


class Mirror(Par):
    """The first of two groups that send it the same."""

    def swap_counts(self, counts: list[int], device: torch.device) -> list[int]:
        return [counts[0]] * 2

    def swap_rows(
        self, rows_NX: torch.Tensor, sent: list[int], received: list[int], kind: str = "rows"
    ) -> torch.Tensor:
        return rows_NX.repeat(2, 1)[: sum(received)].clone()


@pytest.mark.parametrize("expert", [2, 1])
@pytest.mark.parametrize("piece", [256, 4096])
def test_no_more_lies_on_a_rank_than_is_counted(
    expert: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token of both groups has all of its experts here: no more rows can come. Experts take
    what a kernel's launches do: a gated row and a made one for each choice, and their sum."""
    tokens, width, features, active = 96, 2048, 512, 8
    place = Placement(expert=expert, attention_data=2)
    for module in (experts_module, routed_module):
        monkeypatch.setattr(module, "PIECE_CHOICES", piece)
    rows = RoutedRows(
        choice=Choice(num_experts=16, active=active), width=width, features=features,
        placement=place,
    )  # fmt: skip
    spread = SpreadExperts(Mirror(place), 16, width, active)
    x_TM = torch.zeros(tokens, width, dtype=torch.bfloat16)
    ids_TA = torch.arange(8).repeat(tokens, 1)

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(ids.numel(), features)
        made = x.new_zeros(len(hidden), width)
        return made.view(len(x), -1, width)[:, 0].clone()

    with LiveBytes() as live:
        spread.forward(run, x_TM, torch.ones(tokens, active), ids_TA)
    most = rows.nbytes(tokens, 2)
    assert 0.8 * most < live.peak_bytes <= 1.02 * most
