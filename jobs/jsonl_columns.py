"""Whole columns of JSON values against the kinds of `jsonl_types`.

What most columns hold is told from the Python types in them; every other one is looked at value by
value.
"""

from collections.abc import Sequence
from typing import Any

from batchmla.jobs.jsonl_types import Kind, KindName, fits, merge, to_arrow_value, widen

_NULLS = {type(None)}
_PLAIN: dict[KindName, set[type]] = {
    KindName.TEXT: {str},
    KindName.BOOL: {bool},
    KindName.INT: {int},
}


def widen_all(kind: Kind, values: Sequence[Any]) -> Kind:
    """`kind` widened by one value after the other."""
    types = set(map(type, values)) - _NULLS
    if not types or kind.name is KindName.JSON:
        return kind
    if types == {str}:
        return widen(kind, "")
    if types == {bool}:
        return widen(kind, True)
    if types == {int}:
        return merge(kind, Kind(KindName.INT, *_range(values)))
    for value in values:
        kind = widen(kind, value)
    return kind


def fits_all(kind: Kind, values: Sequence[Any]) -> bool:
    """Whether a settled kind holds every value."""
    if kind.name is KindName.JSON:
        return True
    if (plain := _PLAIN.get(kind.name)) is not None:
        types = set(map(type, values)) - _NULLS
        if types <= plain:
            if types != {int}:
                return True
            low, high = _range(values)
            return kind.low <= low and high <= kind.high
    return all(fits(kind, value) for value in values)


def to_arrow_values(kind: Kind, values: Sequence[Any]) -> Sequence[Any]:
    """What Arrow takes for values that fit."""
    plain = {float} if kind.name is KindName.FLOAT else _PLAIN.get(kind.name)
    if plain is not None and set(map(type, values)) - _NULLS <= plain:
        return values
    return [to_arrow_value(kind, value) for value in values]


def _range(values: Sequence[Any]) -> tuple[int, int]:
    """The least and the greatest of whole numbers, of which there is one."""
    there = [value for value in values if value is not None]
    return min(there), max(there)
