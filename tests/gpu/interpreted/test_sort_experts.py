"""The order of choices against Python's stable sort, and the tiles over it."""

import pytest
import torch

from batchmla.kernels.triton.sort_experts import max_tiles, sort_experts


def check(ids_TA: torch.Tensor, num_experts: int, tile_rows: int) -> None:
    tiles = sort_experts(ids_TA, num_experts, tile_rows)
    flat = ids_TA.flatten().tolist()
    known = [choice for choice, expert in enumerate(flat) if 0 <= expert < num_experts]
    order = sorted(known, key=lambda choice: flat[choice])
    assert tiles.order_X[: len(order)].tolist() == order
    ends = [sum(0 <= each <= expert for each in flat) for expert in range(num_experts)]
    assert tiles.ends_E.tolist() == ends
    wanted = [
        (expert, first)
        for expert in range(num_experts)
        for first in range(ends[expert - 1] if expert else 0, ends[expert], tile_rows)
    ]
    unused = max_tiles(len(flat), num_experts, tile_rows) - len(wanted)
    found = list(zip(tiles.expert_N.tolist(), tiles.first_N.tolist(), strict=True))
    assert found == wanted + [(-1, -1)] * unused


@pytest.mark.parametrize(
    ("tokens", "active", "experts"), [(1, 1, 1), (1, 6, 64), (43, 3, 5), (300, 2, 7), (9, 8, 20)]
)
def test_any_numbers(tokens: int, active: int, experts: int) -> None:
    check(torch.randint(experts, (tokens, active)), experts, 16)


def test_one_expert_takes_all() -> None:
    check(torch.full((150, 2), 3), 9, 32)


def test_ids_of_no_expert_here_are_left_out() -> None:
    ids = torch.randint(-3, 12, (60, 4))
    ids[0] = torch.tensor([-1, 2**40, -(2**40), 2**31 + 1])
    check(ids, 8, 16)


def test_all_left_out() -> None:
    check(torch.full((5, 2), -1), 4, 16)


def test_more_blocks_than_are_summed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import batchmla.kernels.triton.sort_experts as module

    monkeypatch.setattr(module, "BLOCK_X", 4)
    monkeypatch.setattr(module, "BLOCK_B", 8)
    check(torch.randint(6, (39, 2)), 6, 4)


def test_strided_ids() -> None:
    check(torch.randint(5, (8, 40)).T, 5, 16)
