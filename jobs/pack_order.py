"""In which order waiting prompts should reach the engine. Pure; an advice, the scheduler decides.

Rows that share a prefix are neighbours, so that it is computed once and held once. Groups, and rows
within a group, are taken from both ends of their order by density (prompt tokens to compute for
each token to generate), so that at any time prompts to compute and completions to continue stand in
the job's own proportion: a step then finds enough of both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from batchmla.core import Prompt, TokenIds

KEY_TOKENS = 1024  # of a prompt's start decide who is whose neighbour
LEAST_SHARED = 32  # tokens that make a common prefix worth staying together for
MIXED_ROWS = 64  # the mixture is kept over about so many rows


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Positions of prompts that begin alike; each has `own` tokens that its neighbours do not."""

    positions: Sequence[int]
    own_tokens: Sequence[int]
    output_tokens: Sequence[int]


@dataclass(slots=True)
class _Mixture:
    """How far what was taken leans to prompts (above 0) or to completions, in prompt tokens."""

    prompts_per_output: float
    lean: float = 0.0

    def add(self, own_tokens: int, output_tokens: int) -> None:
        self.lean += own_tokens - self.prompts_per_output * output_tokens


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Prompts sorted by their ids: `order` holds their positions; the one at `place` has
    `common[place]` leading tokens in common with the one before it, and `best[place]` with one of
    its two neighbours.
    """

    order: Sequence[int]
    common: Sequence[int]
    best: Sequence[int]


def packed_order(
    prompts: Sequence[Prompt],
    output_tokens: Sequence[int],
    *,
    neighbours: Neighbours | None = None,
) -> list[int]:
    """Positions of `prompts` in the order to admit them; each is expected to generate so many
    tokens.
    """
    if not prompts:
        return []
    groups = prefix_groups(prompts, output_tokens, neighbours or find_neighbours(prompts))
    return list(_mix_groups(groups))


def find_neighbours(prompts: Sequence[Prompt]) -> Neighbours:
    """Sorts by the beginnings and compares each prompt with the next."""
    ids = [prompt.token_ids for prompt in prompts]
    keys = [each[:KEY_TOKENS].tobytes() for each in ids]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = [0, *(_common(ids[a], ids[b]) for a, b in pairwise(order)), 0]
    return Neighbours(order, common[:-1], [max(pair) for pair in pairwise(common)])


def prefix_groups(
    prompts: Sequence[Prompt], output_tokens: Sequence[int], neighbours: Neighbours
) -> list[PrefixGroup]:
    """Neighbours part where they have less than half in common of what one of them shares with its
    other neighbour.
    """
    order, common, best = neighbours.order, neighbours.common, neighbours.best
    groups: list[PrefixGroup] = []
    first = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            shared = common[end]
            is_near = 2 * shared >= max(best[end - 1], best[end])
            if is_near and shared >= LEAST_SHARED:
                continue
        members = order[first:end]
        lengths = [len(prompts[member].token_ids) for member in members]
        own = [length - common[first + place] for place, length in enumerate(lengths)]
        own[0] = lengths[0]
        groups.append(PrefixGroup(members, own, [output_tokens[member] for member in members]))
        first = end
    return groups


def _common(one: TokenIds, other: TokenIds) -> int:
    """Leading tokens that both have."""
    least = min(len(one), len(other))
    differs = one[:least] != other[:least]
    first = int(np.argmax(differs)) if least else 0
    return first if least and differs[first] else least


def _mix_groups(groups: Sequence[PrefixGroup]) -> Iterator[int]:
    """Stays with a group until the mixture leans too far, then goes on at the other end."""
    total_own = sum(sum(group.own_tokens) for group in groups)
    total_output = max(1, sum(sum(group.output_tokens) for group in groups))
    num_rows = sum(len(group.positions) for group in groups)
    mixture = _Mixture(total_own / total_output)
    slack = MIXED_ROWS * total_own / num_rows
    ranked = sorted(groups, key=lambda group: sum(group.own_tokens) / sum(group.output_tokens))
    waiting = [_mix_rows(group) for group in ranked]
    low, high = 0, len(waiting) - 1
    is_high = True  # the end with most prompt tokens
    while low <= high:
        place = high if is_high else low
        row = next(waiting[place], None)
        if row is None:
            low, high = (low, high - 1) if is_high else (low + 1, high)
            continue
        position, own, output = row
        yield position
        mixture.add(own, output)
        if abs(mixture.lean) > slack and low < high:
            is_high = mixture.lean < 0


def _mix_rows(group: PrefixGroup) -> Iterator[tuple[int, int, int]]:
    """A group's rows from both ends of their order by density: (position, own, output)."""
    rows = list(zip(group.positions, group.own_tokens, group.output_tokens, strict=True))
    mixture = _Mixture(sum(group.own_tokens) / max(1, sum(group.output_tokens)))
    rows.sort(key=lambda row: row[1] / row[2])
    low, high = 0, len(rows) - 1
    while low <= high:
        if mixture.lean < 0:
            row, high = rows[high], high - 1
        else:
            row, low = rows[low], low + 1
        mixture.add(row[1], row[2])
        yield row
