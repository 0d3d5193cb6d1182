"""The reasoning budget against a plain restatement of its rule over the finished sequence."""

import numpy as np
import pytest
from fakes import make_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.core import Budget, FinishReason, SamplingParams
from batchmla.engine.budget import BudgetState, BudgetWatch
from batchmla.engine.sequence import Sequence

START, END = (50, 51), (60, 61)


def budget(most: int, *, is_open: bool = True, forced: tuple[int, ...] = END) -> Budget:
    return Budget(
        max_reasoning_tokens=most, start_ids=START, end_ids=END, forced_ids=forced, is_open=is_open
    )


def drive(watch: BudgetWatch, choices: list[int], num_tokens: int) -> tuple[list[int], list[bool]]:
    """Lets the model's choices come wherever nothing is forced."""
    ids, forced_flags = [], []
    wishes = iter(choices)
    for _ in range(num_tokens):
        forced = watch.forced()
        token = next(wishes, 1) if forced is None else forced
        watch.push(token)
        ids.append(token)
        forced_flags.append(forced is not None)
    return ids, forced_flags


@pytest.mark.parametrize(
    ("budget", "choices", "want"),
    [
        (budget(3), [1, 2, 3, 4], [1, 2, 3, 60, 61, 4]),
        (budget(0), [1, 2], [60, 61, 1, 2]),
        (budget(2, forced=(70, 71, *END)), [1, 2, 3], [1, 2, 70, 71, 60, 61, 3]),
        (budget(3), [1, 60, 61, 2, 3, 4, 5], [1, 60, 61, 2, 3, 4, 5]),  # closed by the model
        (budget(3), [60, 61, 50, 51, 1, 2, 3, 4], [60, 61, 50, 51, 1, 2, 3, 4]),  # not re-armed
        (budget(2), [1, 60, 61], [1, 60, 60, 61, 61]),  # half an end marker is no end
        (budget(1, is_open=False), [9, 50, 51, 1, 2], [9, 50, 51, 1, 60, 61, 2]),
        (budget(0, is_open=False), [50, 51, 1, 2], [50, 51, 60, 61, 1, 2]),
        (budget(1, is_open=False), [1, 2, 3, 50, 1], [1, 2, 3, 50, 1]),  # never opened
        (budget(1), [50, 51, 1, 2], [50, 60, 61, 51, 1, 2]),
        (budget(2), [50, 51, 1, 2, 3], [50, 51, 1, 2, 60, 61, 3]),  # the prompt's marker once more
        (budget(2), [50, 51, 50, 51, 3], [50, 51, 50, 51, 60, 61, 3]),  # and only once
        (budget(1, is_open=False), [60, 61, 50, 51, 7, 8], [60, 61, 50, 51, 7, 60, 61, 8]),
    ],
)  # fmt: skip
def test_cases(budget: Budget, choices: list[int], want: list[int]) -> None:
    ids, _ = drive(BudgetWatch(budget), choices, len(want))
    assert ids == want


@settings(max_examples=300, deadline=None)
@given(
    choices=st.lists(st.sampled_from([1, 2, 50, 51, 60, 61]), max_size=30),
    most=st.integers(0, 8),
    is_open=st.booleans(),
    message=st.lists(st.sampled_from([2, 70]), max_size=2),
)
def test_reasoning_never_exceeds_its_budget(
    choices: list[int], most: int, is_open: bool, message: list[int]
) -> None:
    forced = (*message, *END)
    watch = BudgetWatch(budget(most, is_open=is_open, forced=forced))
    ids, flags = drive(watch, choices, len(choices) + len(forced))
    repeats = tuple(ids[:2]) == START and not any(flags[:2])  # the prompt's marker once more
    opened = 0 if is_open else find(ids, START, 0)
    if opened is None:
        assert not any(flags)
        return
    begin = opened + len(START) if repeats or not is_open else 0
    natural = find(ids, END, begin)
    if any(flags):
        first = flags.index(True)
        assert first - begin == most, "exactly the budget, then the end"
        assert natural is None or natural >= first - 1
        run = ids[first : first + len(forced)]
        assert tuple(run) == forced[: len(run)] and sum(flags) == len(run)
        if len(run) == len(forced):
            assert watch.state is BudgetState.CLOSED
    else:
        end = len(ids) if natural is None else natural
        assert end - begin <= most or (natural is None and len(ids) - begin <= most)


def find(ids: list[int], marker: tuple[int, ...], start: int) -> int | None:
    places = range(start, len(ids) - len(marker) + 1)
    return next((i for i in places if tuple(ids[i : i + len(marker)]) == marker), None)


def test_forced_tokens_count_towards_max_tokens_and_never_stop_the_row() -> None:
    params = SamplingParams(max_tokens=3, stop_ids=frozenset({60}), budget=budget(1))
    prompt = make_prompt(0, [5, 6], params)
    sequence = Sequence(prompt, arrival=0, max_model_len=100)
    assert sequence.forced_token() is None
    assert sequence.push(9, is_forced=False) is None
    assert sequence.forced_token() == 60
    assert sequence.push(60, is_forced=True) is None
    assert sequence.forced_token() == 61
    assert sequence.push(61, is_forced=True) is FinishReason.LENGTH
    completion = sequence.completion(FinishReason.LENGTH)
    assert completion.token_ids.tolist() == [9, 60, 61] and completion.forced_at == 1
    assert completion.token_ids.dtype == np.int32


def test_max_tokens_inside_the_forced_tokens_ends_the_row() -> None:
    params = SamplingParams(max_tokens=2, budget=budget(1))
    sequence = Sequence(make_prompt(0, [5], params), arrival=0, max_model_len=100)
    sequence.push(9, is_forced=False)
    forced = sequence.forced_token()
    assert forced == 60 and sequence.push(forced, is_forced=True) is FinishReason.LENGTH
