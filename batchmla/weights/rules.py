"""From checkpoint names to weights: which tensor goes where, and which slice of it to which
rank."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchmla.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Tensors `source` of whole `shape` go to the weight `target`.

    Both names may hold {layer} and {expert}, which run over `layers` and `num_experts`; an expert's
    tensor lands in that row of the target's first dimension. Rules with one target are stacked
    along the first (within an expert: first remaining) dimension in the order they are given.
    `shard_axis` is cut into equal parts over the ranks; None: every rank takes all of it. The
    tensors hold floating-point numbers, or with `is_integer` ids. A norm of zeros alone is a fault
    of the checkpoint unless it `may_be_zero`, as where 1 + w multiplies.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    shard_axis: int | None = None
    layers: Sequence[int] = range(1)
    num_experts: int = 1
    is_integer: bool = False
    may_be_zero: bool = False


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
    expert: int | None


def expand(rules: Sequence[Rule | Skip], placement: Placement) -> Iterator[Piece]:
    """Every piece of every rule, in the rules' order within each target."""
    for rule in rules:
        if isinstance(rule, Skip):
            continue
        slices = _slices(rule, placement)
        has_experts = "{expert}" in rule.source
        for layer in rule.layers:
            for expert in range(rule.num_experts):
                yield Piece(
                    rule.source.format(layer=layer, expert=expert),
                    rule.shape,
                    slices,
                    rule.target.format(layer=layer),
                    expert if has_experts else None,
                )


def _slices(rule: Rule, placement: Placement) -> tuple[slice, ...]:
    slices = [slice(0, length) for length in rule.shape]
    if rule.shard_axis is not None:
        share = placement.local(rule.shape[rule.shard_axis], f"rows of {rule.source}")
        slices[rule.shard_axis] = slice(placement.rank * share, (placement.rank + 1) * share)
    return tuple(slices)
