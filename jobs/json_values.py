"""Columns as JSON values, for output that is text.

Times, dates and decimals become text as Arrow writes them, durations whole numbers in their unit,
bytes base64, NaN and infinities null, maps objects if their keys are text and else lists of pairs.
"""

import json
import math
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyarrow import types

from batchmla.jobs.parquet_schema import plain_type

_LINE_MARKS = tuple((mark, f"\\u{ord(mark):04x}") for mark in "\x85\u2028\u2029")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def json_line(value: Any) -> bytes:
    """One line of JSON with its end; no reader takes a character in it for another line end."""
    text = _ENCODER.encode(value)
    if not text.isascii():
        for mark, escape in _LINE_MARKS:
            text = text.replace(mark, escape)
    return text.encode() + b"\n"


def json_values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column."""
    return [one for chunk in column.chunks for one in _values(chunk)]


def _values(array: pa.Array) -> list[Any]:
    dtype = array.type
    plain = plain_type(dtype)
    if plain != dtype:
        return _values(array.cast(plain))
    if isinstance(dtype, pa.ExtensionType):
        return _values(array.storage)
    if types.is_duration(dtype):
        return _values(array.cast(pa.int64()))
    if types.is_temporal(dtype) or types.is_decimal(dtype):
        return _values(array.cast(pa.string()))
    if types.is_struct(dtype):
        return _structs(array)
    if types.is_map(dtype):
        return _maps(array)
    if _is_list(dtype):
        return _lists(array, _values)
    values: list[Any] = array.to_pylist()
    if types.is_floating(dtype):
        return [one if one is None or math.isfinite(one) else None for one in values]
    if types.is_binary(dtype) or types.is_large_binary(dtype) or types.is_fixed_size_binary(dtype):
        return [None if one is None else b64encode(one).decode() for one in values]
    return values


def _is_list(dtype: pa.DataType) -> bool:
    return any(
        test(dtype) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    )


def _structs(array: pa.StructArray) -> list[Any]:
    valid = array.is_valid().to_pylist()
    names = [field.name for field in array.type]
    fields = [_values(array.field(position)) for position in range(len(names))]
    rows = zip(*fields, strict=True) if fields else iter([()] * len(array))
    made = (dict(zip(names, row, strict=True)) for row in rows)
    return [row if is_there else None for row, is_there in zip(made, valid, strict=True)]


def _maps(array: pa.MapArray) -> list[Any]:
    dtype = array.type
    entries = pa.struct([("key", dtype.key_type), ("value", dtype.item_type)])
    items = _lists(array.cast(pa.list_(entries)), _values)
    pairs = [None if one is None else [(e["key"], e["value"]) for e in one] for one in items]
    is_text = types.is_string(dtype.key_type) or types.is_large_string(dtype.key_type)
    if is_text:
        return [None if one is None else dict(one) for one in pairs]
    return [None if one is None else [list(pair) for pair in one] for one in pairs]


def _lists(array: pa.Array, values_of: Callable[[pa.Array], list[Any]]) -> list[Any]:
    flat = values_of(array.flatten())
    lengths = array.value_lengths().to_pylist()
    made: list[Any] = []
    at = 0
    for length in lengths:
        made.append(None if length is None else flat[at : at + length])
        at += length or 0
    return made
