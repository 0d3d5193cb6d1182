"""Steps begun before the one before them is read: a stream that delivers late, the same ids."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import ROOMY, ids, mixed_prompts
from fakes import ListSource, greedy_ids, make_prompt
from watched import WatchedEngine, run

from batchmla.core import Budget, FinishReason, SamplingParams


class LateStream:
    """Delivers what was asked for only when it is waited for, and notes in which order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, values: torch.Tensor) -> Callable[[], list[Any]]:
        number = sum(event.startswith("start") for event in self.events)
        self.events.append(f"start {number}")
        held = values.clone()

        def wait() -> list[Any]:
            assert f"wait {number}" not in self.events, "read twice"
            self.events.append(f"wait {number}")
            found: list[Any] = held.tolist()
            return found

        return wait

    @property
    def num_overlapped(self) -> int:
        """Steps that were begun while the one before had not been read."""
        return sum(
            self.events.index(f"start {number + 1}") < self.events.index(f"wait {number}")
            for number in range(sum(each.startswith("start") for each in self.events) - 1)
            if f"wait {number}" in self.events
        )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"max_batched_tokens": 1},
        {"max_batched_tokens": 7},
        {"max_batched_tokens": 64, "max_num_seqs": 3},
        {"share_generated": False},
        {"num_pages": 24, "page_tokens": 4},
        {"num_pages": 96, "page_tokens": 1, "max_batched_tokens": 19},
        {"num_groups": 2},
    ],
    ids=str,
)
def test_ids_are_those_of_single_steps(change: dict[str, int]) -> None:
    prompts = mixed_prompts(5)
    want = ids(run(WatchedEngine(**ROOMY), prompts))
    stream = LateStream()
    engine = WatchedEngine(**{**ROOMY, **change}, reader=stream)
    assert ids(run(engine, prompts)) == want
    assert ids(run(engine, prompts[::-1])) == want
    if change.get("num_pages"):
        assert engine.stats().preemptions > 0
    assert stream.num_overlapped > 0
    engine.check_pool()


@pytest.mark.parametrize("seed", range(8))
def test_ids_for_fresh_rows_in_a_small_pool(seed: int) -> None:
    rng = np.random.default_rng(seed + 100)
    prompts = mixed_prompts(seed + 100, count=20)
    want = ids(run(WatchedEngine(**ROOMY), prompts))
    sizes = {
        "num_pages": int(rng.integers(24, 60)), "max_num_seqs": int(rng.integers(2, 9)),
        "max_batched_tokens": int(rng.integers(2, 70)), "max_model_len": 96,
    }  # fmt: skip
    engine = WatchedEngine(**sizes, reader=LateStream())
    assert ids(run(engine, prompts)) == want
    engine.check_pool()


def test_every_decode_step_begins_before_the_last_one_is_read() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    prompts = [make_prompt(i, [i, 5, 6], params) for i in range(4)]
    stream = LateStream()
    found = run(WatchedEngine(**ROOMY, reader=stream), prompts)
    for prompt in prompts:
        assert found[prompt.index].token_ids.tolist() == greedy_ids(prompt.token_ids, 20)
    assert stream.num_overlapped >= 18
    begun = sum(event.startswith("start") for event in stream.events)
    assert begun == 20, "a step too many, or one for rows that were known to end"


def test_a_row_that_stops_has_one_step_too_many_that_counts_for_nothing() -> None:
    free = greedy_ids([1, 2, 3], 12)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_ids=frozenset(free[5:6]))
    engine = WatchedEngine(**ROOMY, reader=LateStream())
    found = run(engine, [make_prompt(0, [1, 2, 3], params)])
    end = free.index(free[5])
    assert found[0].token_ids.tolist() == free[:end]
    assert found[0].finish_reason is FinishReason.STOP
    assert engine.stats().generated_tokens == end


@pytest.mark.parametrize("most", [0, 1, 2, 5])
@pytest.mark.parametrize("loops", [None, 2])
def test_budgets_end_where_they_would(most: int, loops: int | None) -> None:
    budget = Budget(
        max_reasoning_tokens=most, start_ids=(200,), end_ids=(90, 91), forced_ids=(80, 90, 91),
        is_open=True, loop_repeats=loops,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=20, budget=budget)
    prompts = [make_prompt(i, [i, 3, 4], params, expected_tokens=1) for i in range(8)]
    prompts += [
        replace(each, index=each.index + 8, row_id=f"{each.index + 8}", params=replace(
            params, budget=replace(budget, is_open=False, start_ids=(each.index,))
        ))
        for each in prompts
    ]  # fmt: skip
    sizes = {
        "num_pages": 16, "page_tokens": 3, "max_model_len": 24, "max_num_seqs": 8,
        "max_batched_tokens": 9,
    }  # fmt: skip
    want = run(WatchedEngine(**sizes), prompts)
    found = run(WatchedEngine(**sizes, reader=LateStream()), prompts)
    assert ids(found) == ids(want)
    assert [found[i].forced_at for i in sorted(found)] == [want[i].forced_at for i in sorted(want)]


@pytest.mark.parametrize("position", [4, 9])
def test_a_row_without_numbers_fails_alone(position: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [make_prompt(i, [40 + i, 7, 8], params) for i in range(5)]
    poison = greedy_ids(prompts[2].token_ids, 12)[position - 3]
    want = run(WatchedEngine(**ROOMY, poison=poison), prompts)
    engine = WatchedEngine(**ROOMY, poison=poison, reader=LateStream())
    found = run(engine, prompts)
    assert [found[i].error for i in range(5)] == [want[i].error for i in range(5)]
    assert any(completion.error for completion in found.values())
    assert ids(found) == ids(want)
    engine.check_pool()


def test_an_engine_left_in_the_middle_goes_on_with_other_rows() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9)
    engine = WatchedEngine(**ROOMY, reader=LateStream())
    running = engine.generate(ListSource([make_prompt(i, [i, 9], params) for i in range(6)]))
    next(running)
    running.close()
    engine.check_pool()
    found = run(engine, [make_prompt(0, [3, 9], params)])
    assert found[0].token_ids.tolist() == greedy_ids([3, 9], 9)
