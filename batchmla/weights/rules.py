"""From checkpoint names to weights: which tensor goes where, and which slice of it to which
rank."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchmla.errors import JobError
from batchmla.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Tensors `source` of whole `shape` go to the weight `target`.

    Both names may hold {layer} and {expert}, which run over `layers` and `num_experts`; an expert's
    tensor lands in that row of the target's first dimension. Rules with one target are stacked
    along the first (within an expert: first remaining) dimension in the order they are given.
    `shard_axis` is cut into equal parts over the ranks; None: every rank takes all of it. With
    `num_parts` it is not cut finer than into so many, and ranks that outnumber them hold copies.
    `group_axis`, which may be the same one, is cut further over the attention groups, where each
    gets whole units of `group_unit` of it. Experts are dealt to ranks first, and cut over those
    that share one. The tensors hold
    floating-point numbers, or with `is_integer` ids. A norm of zeros alone is a fault of the
    checkpoint unless it `may_be_zero`, as where 1 + w multiplies.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    shard_axis: int | None = None
    layers: Sequence[int] = range(1)
    num_experts: int = 1
    num_parts: int | None = None
    group_axis: int | None = None
    group_unit: int = 1
    is_integer: bool = False
    may_be_zero: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether there is a tensor for each expert."""
        return "{expert}" in self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Tensors that match `pattern` are known and not loaded; `reason` is logged once.

    With `from_layer` the pattern's first group is a layer index and only such layers are skipped.
    """

    pattern: str
    reason: str
    from_layer: int | None = None

    def covers(self, name: str) -> bool:
        """Whether the tensor `name` is skipped."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return False
        return self.from_layer is None or int(match[1]) >= self.from_layer


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor on its way into one weight."""

    source: str
    shape: tuple[int, ...]  # whole
    slices: tuple[slice, ...]  # this rank's share
    target: str
    expert: int | None  # counted among this rank's


def expand(rules: Sequence[Rule | Skip], placement: Placement) -> Iterator[Piece]:
    """Every piece of every rule that this rank takes, in the rules' order within each target."""
    for rule in rules:
        if isinstance(rule, Skip):
            continue
        slices = _slices(rule, placement)
        has_experts = rule.has_experts
        experts = placement.expert_ids(rule.num_experts) if has_experts else range(1)
        for layer in rule.layers:
            for expert in experts:
                yield Piece(
                    rule.source.format(layer=layer, expert=expert),
                    rule.shape,
                    slices,
                    rule.target.format(layer=layer),
                    expert - experts.start if has_experts else None,
                )


def refuse_cuts(rules: Sequence[Rule | Skip], placement: Placement) -> None:
    """Raises a `JobError` for the first tensor that cannot be cut so."""
    for rule in rules:
        if isinstance(rule, Rule):
            _slices(rule, placement)
            if rule.has_experts:
                placement.local_experts(rule.num_experts)


def refuse_dealing(rules: Sequence[Rule | Skip], placement: Placement) -> None:
    """A `JobError` where experts should be dealt to ranks and there are none."""
    has_experts = any(isinstance(rule, Rule) and rule.has_experts for rule in rules)
    if placement.expert > 1 and not has_experts:
        raise JobError(
            f"model.parallel.expert is {placement.expert}, but the model has no experts; set it to "
            "1"
        )


def _slices(rule: Rule, placement: Placement) -> tuple[slice, ...]:
    slices = [slice(0, length) for length in rule.shape]
    if rule.shard_axis is not None:
        length, what = rule.shape[rule.shard_axis], f"rows of {rule.source}"
        if rule.has_experts:
            share, index = placement.local_expert_features(length), placement.expert_share
        elif rule.num_parts is not None and placement.copies(rule.num_parts) > 1:
            share = length // rule.num_parts
            index = placement.tensor_rank // placement.copies(rule.num_parts)
        else:
            share, index = placement.local(length, what), placement.tensor_rank
        slices[rule.shard_axis] = slice(index * share, (index + 1) * share)
    if rule.group_axis is not None:
        whole = slices[rule.group_axis]
        groups = placement.common(whole.stop - whole.start, rule.group_unit)
        share = (whole.stop - whole.start) // groups
        first = whole.start + placement.group % groups * share
        slices[rule.group_axis] = slice(first, first + share)
    return tuple(slices)
