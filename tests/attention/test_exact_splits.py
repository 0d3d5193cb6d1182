"""Exact mode's groups for generated positions."""

import numpy as np
import torch

from batchmla.attention.exact_splits import SPLIT_KEYS, Positions, split_groups
from batchmla.kv.step import Step

PAGE_TOKENS = 64
NUM_SHARED = 2  # splits


def make_step(contexts: list[int]) -> Step:
    """One generated position a sequence; all but the last share the pages of two splits."""
    shared = list(range(1, 1 + NUM_SHARED * SPLIT_KEYS // PAGE_TOKENS))
    pages = np.zeros((len(contexts), -(-max(contexts) // PAGE_TOKENS)), np.int64)
    for row, context in enumerate(contexts):
        count = -(-context // PAGE_TOKENS)
        own = [100 * (row + 1) + n for n in range(count)]
        known = shared[:count] if row < len(contexts) - 1 else []
        pages[row, :count] = known + own[len(known) :]
    zeros = torch.zeros(len(contexts), dtype=torch.int64)
    return Step(
        tokens_T=zeros,
        positions_T=zeros,
        slots_T=zeros,
        pages_SP=torch.from_numpy(pages),
        logits_rows_N=zeros,
        page_tokens=PAGE_TOKENS,
        host_starts_S1=np.arange(len(contexts) + 1),
        host_context_S=np.array(contexts),
        host_prompt_S=np.ones(len(contexts), np.int64),
        is_exact=True,
    )


def test_every_key_of_every_position_is_seen_once_and_shared_splits_are_one_sequence() -> None:
    contexts = [513, 40, 600, 257, 700, 300, 800]
    step = make_step(contexts)
    everyone = np.arange(len(contexts))
    found = Positions(rows_N=everyone, sequences_N=everyone, positions_N=step.host_context_S - 1)
    groups, rows = split_groups(step, found, torch.float32)
    assert sorted(rows.tolist()) == everyone.tolist()
    seen: dict[int, list[int]] = {row: [] for row in everyone.tolist()}
    for group in (*groups.prefixes, *groups.members):
        for place in range(group.num_rows):
            row = int(rows[group.first_row + place])
            pages = group.pages_GP[0 if group.num_queries > 1 else place].tolist()
            count = group.num_keys
            if group.bias_GQL is not None:
                count = int((group.bias_GQL[place, 0] == 0).sum())
            seen[row] += [page * PAGE_TOKENS + n for page in pages for n in range(PAGE_TOKENS)][
                :count
            ]
    for row, context in enumerate(contexts):
        ids = step.pages_SP[row].tolist()
        expected = [page * PAGE_TOKENS + n for page in ids for n in range(PAGE_TOKENS)][:context]
        assert seen[row] == expected
    shared = [group for group in groups.prefixes if group.num_queries > 1]
    assert max(group.num_queries for group in shared) >= 3


def test_a_position_gets_the_same_keys_and_padding_whoever_else_is_there() -> None:
    contexts = [513, 600, 700, 800]
    step = make_step(contexts)
    shapes = []
    for chosen in (np.arange(4), np.array([1])):
        found = Positions(
            rows_N=chosen, sequences_N=chosen, positions_N=step.host_context_S[chosen] - 1
        )
        groups, rows = split_groups(step, found, torch.float32)
        place = rows.tolist().index(1)
        shapes.append(
            [
                group.num_keys
                for group in (*groups.prefixes, *groups.members)
                if group.first_row <= place < group.first_row + group.num_rows
            ]
        )
    assert shapes[0] == shapes[1] == [SPLIT_KEYS, SPLIT_KEYS, 128]
