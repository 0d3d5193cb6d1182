"""The packed order: neighbours by prefix, and a steady mixture."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.core import Prompt, SamplingParams
from batchmla.jobs.pack_order import (
    MIXED_ROWS,
    PrefixGroup,
    find_neighbours,
    packed_order,
    prefix_groups,
)


def prompt(index: int, ids: list[int] | np.ndarray) -> Prompt:
    token_ids = np.array(ids, dtype=np.int32)
    return Prompt(row_id=f"d{index}", index=index, params=SamplingParams(), token_ids=token_ids)


def prompts_of(documents: list[list[int]], count: int) -> list[Prompt]:
    return [prompt(i, documents[i % len(documents)] + [90_000 + i] * 9) for i in range(count)]


def groups_of(prompts: list[Prompt]) -> list[PrefixGroup]:
    return prefix_groups(prompts, [1] * len(prompts), find_neighbours(prompts))


def changes(order: list[int], kinds: int) -> int:
    """How often the next row belongs to another document."""
    return sum(a % kinds != b % kinds for a, b in pairwise(order))


def test_rows_of_one_prefix_stay_together() -> None:
    documents = [list(range(1000 * n, 1000 * n + 50 + n)) for n in range(5)]
    order = packed_order(prompts_of(documents, 60), [10] * 60)
    assert sorted(order) == list(range(60)) and changes(order, 5) == 4


def test_a_group_knows_what_its_rows_compute_themselves() -> None:
    documents = [list(range(1000 * n, 1000 * n + 64)) for n in range(2)]
    groups = groups_of(prompts_of(documents, 8))
    assert sorted(map(len, (group.positions for group in groups))) == [4, 4]
    for group in groups:
        assert list(group.own_tokens) == [73, 9, 9, 9]


def test_a_short_common_beginning_makes_no_group() -> None:
    header = list(range(40))
    documents = [header + list(range(1000 * n, 1000 * n + 200)) for n in range(1, 4)]
    groups = groups_of(prompts_of(documents, 30))
    assert [len(group.positions) for group in groups] == [10, 10, 10]
    alone = [prompt(i, [*range(20), 500 + i, *range(900)]) for i in range(4)]
    assert [len(group.positions) for group in groups_of(alone)] == [1] * 4


def test_prompts_of_one_system_prompt_are_one_group_however_long_they_are() -> None:
    system = list(range(300))
    rng = np.random.default_rng(0)
    prompts = [prompt(i, [*system, *rng.integers(900, 9999, 50 * i).tolist()]) for i in range(40)]
    assert len(groups_of(prompts)) == 1


def lean(order: list[int], prompts: list[Prompt], outputs: list[int]) -> float:
    """The largest distance of what was taken from the whole's proportion, in mean prompts."""
    own = np.array([len(prompts[place].token_ids) for place in order], float)
    out = np.array([outputs[place] for place in order], float)
    distance = np.cumsum(own - own.sum() / out.sum() * out)
    return float(np.abs(distance).max() / own.mean())


def test_long_prompts_and_long_completions_are_mixed_however_the_input_lies() -> None:
    rng = np.random.default_rng(1)
    count = 2000
    prompts = [prompt(i, rng.integers(0, 9999, 600 if i < 1000 else 30)) for i in range(count)]
    outputs = [20] * 1000 + [400] * 1000
    assert lean(list(range(count)), prompts, outputs) > 900
    order = packed_order(prompts, outputs)
    assert sorted(order) == list(range(count))
    assert lean(order, prompts, outputs) < MIXED_ROWS + 3


def test_within_a_group_the_mixture_holds_from_row_to_row() -> None:
    rng = np.random.default_rng(2)
    system = rng.integers(0, 9999, 100).tolist()
    prompts = [
        prompt(i, [*system, *rng.integers(0, 9999, 10 + 3 * i).tolist()]) for i in range(200)
    ]
    outputs = rng.integers(1, 500, 200).tolist()
    order = packed_order(prompts, outputs)
    own = [3 * place + 10 for place in order[1:]]
    distance = np.cumsum(own) - sum(own) / sum(outputs) * np.cumsum([outputs[p] for p in order[1:]])
    assert np.abs(distance).max() < 4 * max(own)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 80), st.integers(1, 60)), max_size=40
    ),
)
def test_every_row_comes_once(rows: list[tuple[int, int, int]]) -> None:
    prompts = [prompt(i, [kind] * 40 + [i] * length) for i, (kind, length, _) in enumerate(rows)]
    order = packed_order(prompts, [output for *_, output in rows])
    assert sorted(order) == list(range(len(rows)))


def test_prompts_without_a_difference_or_a_token_are_no_trouble() -> None:
    prompts = [prompt(i, ids) for i, ids in enumerate(([], [], [5] * 64, [5] * 64, [5] * 40))]
    assert sorted(packed_order(prompts, [1] * 5)) == [0, 1, 2, 3, 4]
