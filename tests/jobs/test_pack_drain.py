"""The end of a job runs longest first, by what has been learned of lengths."""

import numpy as np
import pytest

from batchmla.core import Completion, FinishReason, Prompt, SamplingParams
from batchmla.jobs.pack import Packer
from batchmla.jobs.pack_drain import drain_rows, longest_first
from batchmla.jobs.pack_twins import Waiting

ANY_END = frozenset((1,))


def prompts(
    kinds: list[int], limits: list[int] | None = None, first: int = 0, own_tokens: int = 4
) -> list[Prompt]:
    """A beginning for each kind; with `limits` nothing else ends a row."""
    found = []
    for index, kind in enumerate(kinds, first):
        ids = np.concatenate([np.full(80, kind), np.full(own_tokens, 100 + index)])
        params = SamplingParams(max_tokens=5000, stop_ids=ANY_END)
        if limits is not None:
            params = SamplingParams(max_tokens=limits[index - first])
        found.append(
            Prompt(row_id=str(index), index=index, params=params, token_ids=ids.astype(np.int32))
        )
    return found


def packer_of(rows: list[Prompt], order: str = "auto") -> Packer:
    packer = Packer(order=order, window_rows=100_000)  # type: ignore[arg-type]
    packer.put([Waiting(each, 0, each.index) for each in rows])
    packer.end()
    return packer


def completion_of(prompt: Prompt, num_tokens: int) -> Completion:
    return Completion(
        row_id=prompt.row_id, index=prompt.index, token_ids=np.zeros(num_tokens, np.int32),
        finish_reason=FinishReason.STOP, prompt_tokens=1,
    )  # fmt: skip


def take_all(packer: Packer, limit: int) -> list[Prompt]:
    taken: list[Prompt] = []
    while part := packer.take(limit, wait=True):
        taken += part
    return taken


@pytest.mark.parametrize(
    ("lengths", "places", "rows"),
    [([5, 5, 5, 5], 2, 2), ([9, 1, 1, 1], 2, 4), ([1, 1, 4, 2], 1, 2), ([], 3, 0)],
)
def test_so_many_rows_keep_all_places_busy_as_long_as_the_longest_takes(
    lengths: list[int], places: int, rows: int
) -> None:
    assert drain_rows(lengths, places) == rows


def test_rows_of_about_one_length_keep_their_order() -> None:
    assert longest_first([3, 8, 2, 15, 3, 16]) == [5, 1, 3, 0, 2, 4]


def test_the_end_is_sorted_as_far_as_the_longest_row_reaches_and_no_further() -> None:
    rng = np.random.default_rng(3)
    limits = rng.choice([40, 900], 1200).tolist()
    order = [limits[each.index] for each in take_all(packer_of(prompts([0] * 1200, limits)), 16)]
    assert sorted(order) == sorted(limits)
    doublings = [length.bit_length() for length in order]
    start = next(at for at in range(1200) if doublings[at:] == sorted(doublings[at:], reverse=True))
    busy_steps = sum(order[start:]) / 16
    assert 0.9 * max(limits) < busy_steps < 2 * max(limits)
    assert start > 1000


def test_what_was_learned_while_the_job_ran_decides_who_comes_last() -> None:
    """Nothing is known when the rows are packed; then one kind turns out to be long."""
    rows = prompts([index % 2 for index in range(400)])
    packer = packer_of(rows)
    order = []
    while part := packer.take(8, wait=True):
        order += [each.index % 2 for each in part]
        for each in part:
            packer.learn(completion_of(each, 900 if each.index % 2 else 30))
    assert sum(order) == 200
    last = order[-24:]
    assert last == sorted(last, reverse=True) and not last[-1]


def test_input_order_stays_input_order_to_the_end() -> None:
    limits = list(range(1, 201))
    taken = take_all(packer_of(prompts([0] * 200, limits), order="input"), 8)
    assert [each.index for each in taken] == list(range(200))


def test_before_the_end_of_the_input_nothing_is_sorted() -> None:
    limits = [1 + 37 * index % 101 for index in range(200)]
    packer = Packer(order="auto", window_rows=100_000)
    packer.put([Waiting(each, 0, each.index) for each in prompts([0] * 200, limits)])
    before = [limits[each.index] for each in packer.take(200, wait=False)]
    assert before[-50:] != sorted(before[-50:], reverse=True)
