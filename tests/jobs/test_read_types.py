"""Types of JSON columns: whatever the values, one type holds them all and loses nothing."""

import json
import math
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.jobs.jsonl_types import (
    JSON,
    NULL,
    arrow_type,
    fits,
    kind_of,
    merge,
    settle,
    to_arrow_value,
    widen,
)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**66), 2**66),
    st.sampled_from([0, 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)]),
    st.floats(allow_infinity=True, allow_nan=True),
    st.text(max_size=3),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


def without_gaps(value: Any, given_value: Any) -> Any:
    """An Arrow value with the keys that its JSON had; a missing key and null are one."""
    if value == "{}" and given_value == {}:
        return {}  # an object without keys is text
    if isinstance(value, dict):
        return {key: without_gaps(value[key], one) for key, one in given_value.items()}
    if isinstance(value, list):
        return [without_gaps(a, b) for a, b in zip(value, given_value, strict=True)]
    return value


def is_same(found: Any, value: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return found is None or math.isnan(found)
    if isinstance(value, dict):
        return set(found) == set(value) and all(is_same(found[k], v) for k, v in value.items())
    if isinstance(value, list):
        return len(found) == len(value) and all(map(is_same, found, value))
    return bool(found == value) and (isinstance(found, bool) == isinstance(value, bool))


@settings(max_examples=120, deadline=None)
@given(st.lists(VALUES, max_size=6))
def test_one_type_holds_every_value_exactly(values: list[Any]) -> None:
    kind = NULL
    for value in values:
        kind = widen(kind, value)
    kind = settle(kind)
    assert all(fits(kind, value) for value in values)
    array = pa.array([to_arrow_value(kind, value) for value in values], arrow_type(kind))
    for found, value in zip(array.to_pylist(), values, strict=True):
        if kind == JSON:
            assert is_same(None if found is None else json.loads(found), value)
        else:
            assert is_same(without_gaps(found, value), value)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, max_size=5), st.randoms(use_true_random=False))
def test_the_type_does_not_depend_on_the_order(values: list[Any], random: Any) -> None:
    def type_of(ordered: list[Any]) -> str:
        kind = NULL
        for value in ordered:
            kind = merge(kind, kind_of(value))
        return str(sorted(str(arrow_type(settle(kind)))))  # fields come in order of appearance

    shuffled = values[:]
    random.shuffle(shuffled)
    assert type_of(values) == type_of(shuffled)
