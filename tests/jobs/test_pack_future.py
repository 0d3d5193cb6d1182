"""Which pages of the window are wanted again, against the definition."""

import numpy as np
import pytest

from batchmla.core import Prompt, SamplingParams
from batchmla.jobs.pack_future import QUEUE_ROWS, PrefixFuture
from batchmla.jobs.pack_order import find_neighbours, packed_order
from batchmla.kv.pages import PageHash, chain_hashes

PAGE = 8


def prompt(index: int, ids: list[int]) -> Prompt:
    token_ids = np.array(ids, dtype=np.int32)
    return Prompt(row_id=f"d{index}", index=index, params=SamplingParams(), token_ids=token_ids)


def names_of(each: Prompt) -> list[PageHash]:
    known: list[PageHash] = []
    chain_hashes(known, each.token_ids, PAGE, len(each.token_ids))
    return known


def random_prompts(seed: int, count: int) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, 99, int(n)).tolist() for n in rng.integers(4, 60, 5)]
    texts = [rng.integers(0, 99, int(n)).tolist() for n in rng.integers(4, 60, 9)]
    prompts = []
    for index in range(count):
        ids = systems[rng.integers(5)] + (texts[rng.integers(9)] if rng.random() < 0.6 else [])
        prompts.append(prompt(index, ids + rng.integers(0, 99, rng.integers(0, 20)).tolist()))
    return prompts


@pytest.mark.parametrize("seed", range(4))
def test_shared_pages_are_wanted_from_their_first_place_to_their_last(seed: int) -> None:
    prompts = random_prompts(seed, 120)
    neighbours = find_neighbours(prompts)
    order = packed_order(prompts, [9] * 120, neighbours=neighbours)
    future = PrefixFuture(PAGE)
    future.plan(prompts, neighbours, order)
    places: dict[PageHash, list[int]] = {}
    for place, position in enumerate(order):
        for name in names_of(prompts[position]):
            places.setdefault(name, []).append(place)
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert len(shared) > 20
    for now in (0, 30, 119):
        for name, found in places.items():
            want = None
            if name in shared and found[-1] + QUEUE_ROWS >= now:
                want = max(found[0], now)
            assert future.next_use(name) == want
        future.take({0: 30, 30: 89}.get(now, 0))


def test_a_later_plan_goes_on_where_the_first_ended() -> None:
    system = list(range(PAGE))
    first = [prompt(i, [*system, 50 + i]) for i in range(3)]
    (name,) = names_of(first[0])
    future = PrefixFuture(PAGE)
    future.plan(first, find_neighbours(first), [0, 1, 2])
    future.take(3)
    others = [prompt(i, [900 + i] * 20) for i in range(QUEUE_ROWS)]
    future.plan(others, find_neighbours(others), list(range(QUEUE_ROWS)))
    assert future.next_use(name) == 3
    future.take(QUEUE_ROWS)
    assert future.next_use(name) is None
    again = [prompt(i, [*system, 70 + i]) for i in range(2)]
    future.plan(again, find_neighbours(again), [0, 1])
    assert future.next_use(name) == 3 + QUEUE_ROWS
