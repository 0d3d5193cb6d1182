"""Rows on their way through experts that ranks share: how many ranks a token reaches, and what that
takes on one of them. From shapes alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchmla.kernels.ops import Ops, PackKind
from batchmla.layers.block import Block, Weight, walk
from batchmla.layers.experts import PIECE_CHOICES, row_bytes
from batchmla.layers.moe import Router
from batchmla.models import get_family
from batchmla.parallel import Par
from batchmla.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a token's experts are chosen: `active` of those of its `kept` router groups."""

    num_experts: int
    active: int
    groups: int = 1
    kept: int = 1

    def reached(self, holders: int) -> float:
        """The probability that a token has an expert with one of so many equal holders, were all
        choices alike: 1 - Σ_j P(j router groups' worth of the holder is kept) · C(K - h_j, A) /
        C(K, A), with K kept experts, h_j of them the holder's."""
        group = self.num_experts // self.groups
        kept_experts, held = self.kept * group, self.num_experts // holders
        if held <= group:  # a part of one router group, or, by chance, of two alike
            return self.kept / self.groups * self._hit(kept_experts, held)
        own = held // group
        return sum(
            _drawn(self.groups, own, self.kept, count) * self._hit(kept_experts, count * group)
            for count in range(min(own, self.kept) + 1)
        )

    def most_holders(self, holders: int) -> int:
        """With which a token can have experts."""
        group, held = self.num_experts // self.groups, self.num_experts // holders
        spanned = -(-group // held) if group % held == 0 or held % group == 0 else holders
        return min(holders, self.active, self.kept * spanned)

    def _hit(self, experts: int, held: int) -> float:
        return 1 - math.comb(experts - held, self.active) / math.comb(experts, self.active)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """A layer with experts on one rank. `width` of a row, `features` of an expert's share here."""

    choice: Choice
    width: int
    features: int
    placement: Placement

    def nbytes(self, tokens: int, itemsize: int, *, is_exact: bool = False) -> int:
        """The most that lies there besides the layer's own input: of every group's `tokens`, all
        may have experts on this rank, and each goes to as many ranks as its router allows.

        Where ranks have whole experts a piece of `PIECE_CHOICES` is computed at a time, as rows
        gathered, gated, made and weighed, then as float32, and is added to a float32 sum; else all
        choices are. Rows of groups come packed and return as sums, which are added in float32.
        """
        rows = tokens * self.choice.active if is_exact else tokens
        active = 1 if is_exact else self.choice.active
        groups, is_whole = self.placement.attention_data, self.placement.expert == 1
        if groups == 1:
            return self._run_bytes(rows, active, itemsize)
        sent, got = rows * self._most_groups(active), rows * groups
        row = self.width * itemsize
        packed = row_bytes(self.width, active, itemsize)
        return max(
            sent * (row + packed),
            (sent + got) * packed,
            got * (packed + row * is_whole) + self._run_bytes(got, active, itemsize),
            (sent + got) * row,
            sent * (row + 4 * self.width) + rows * 4 * self.width,
        )

    def _most_groups(self, active: int) -> int:
        """To which a row can go."""
        placement = self.placement
        if placement.expert in (placement.num_ranks, placement.attention_data):
            most = self.choice.most_holders(placement.expert)
            return min(placement.attention_data, active, most)
        return placement.attention_data

    def _run_bytes(self, rows: int, active: int, itemsize: int) -> int:
        width, choices = self.width, rows * active
        if self.placement.expert == 1:
            return (choices * (self.features + width) + rows * width) * itemsize
        piece = min(choices, PIECE_CHOICES)
        gated = (3 * width + self.features) * itemsize
        computed = piece * max(gated, (itemsize + 4) * width)
        return max(computed, rows * width * itemsize) + rows * 4 * width


def routed_rows(raw_config: Mapping[str, Any], placement: Placement, ops: Ops) -> RoutedRows | None:
    """Of a parsed `config.json`; None of a model without experts."""
    family = get_family(raw_config)
    model = family.build(family.Config.from_hf(raw_config), Par(placement), ops)
    assert isinstance(model, Block), f"{type(model)} has no weights"
    choice = choice_of(model, placement)
    if choice is None:
        return None
    _, gated, width = _ups(model)[0].shape
    return RoutedRows(choice=choice, width=width, features=gated // 2, placement=placement)


def choice_of(model: Block, placement: Placement) -> Choice | None:
    """Of the first layer with experts of a rank's model; None where there is none."""
    ups = _ups(model)
    if not ups:
        return None
    num_experts = ups[0].shape[0] * placement.expert
    active = round(ups[0].active_share * num_experts)
    routers = (block.dims for block in walk(model) if isinstance(block, Router))
    dims = next(routers, None)
    if dims is None or num_experts % dims.groups:
        return Choice(num_experts=num_experts, active=active)
    return Choice(num_experts=num_experts, active=active, groups=dims.groups, kept=dims.kept_groups)


def _ups(model: Block) -> list[Weight]:
    return [weight for _, weight in model.named_weights() if weight.kind is PackKind.EXPERTS_UP]


def _drawn(total: int, marked: int, drawn: int, count: int) -> float:
    """The probability that `count` of `marked` ones are among so many drawn of a total."""
    others = math.comb(total - marked, drawn - count)
    return math.comb(marked, count) * others / math.comb(total, drawn)
