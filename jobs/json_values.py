"""Columns as JSON values, for output that is text.

Times, dates and decimals become text as Arrow writes them, durations whole numbers in their unit,
bytes base64, NaN and infinities null, maps objects if their keys are text and else lists of pairs.
"""

import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from json.encoder import encode_basestring
from typing import Any

import pyarrow as pa
from pyarrow import types

from batchmla.jobs.array_values import array_values
from batchmla.jobs.parquet_schema import plain_type

_LINE_MARKS = tuple((mark, f"\\u{ord(mark):04x}") for mark in "\x85\u2028\u2029")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_WRITERS: Mapping[type, Callable[[Any], str]] = {
    str: encode_basestring,
    int: int.__repr__,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): lambda _: "null",
}


def json_line(value: Any) -> bytes:
    """One line of JSON with its end; no reader takes a character in it for another line end."""
    return _encoded(_ENCODER.encode(value) + "\n")


def json_lines(columns: Mapping[str, pa.ChunkedArray], num_rows: int) -> bytes:
    """The same for rows whose columns are the keys of an object, in the order given."""
    pieces: list[Iterable[str]] = []
    before = "{"
    for name, column in columns.items():
        before += f"{encode_basestring(name)}: "
        if column.null_count == num_rows:
            before += "null"
        else:
            pieces += [repeat(before, num_rows), _texts(json_values(column))]
            before = ""
        before += ", "
    end = before.removesuffix(", ") + "}\n"
    lines = map("".join, zip(*pieces, repeat(end, num_rows), strict=True))
    return _encoded("".join(lines))


def json_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table as objects."""
    names = table.column_names
    columns = [json_values(column) for column in table.columns]
    rows = zip(*columns, strict=True) if columns else iter([()] * table.num_rows)
    return (dict(zip(names, row, strict=True)) for row in rows)


def _texts(values: Sequence[Any]) -> Iterable[str]:
    """What the encoder makes of each value."""
    types = set(map(type, values))
    if len(types) == 1 and (write := _WRITERS.get(*types)) is not None:
        return map(write, values)
    return [_WRITERS.get(type(value), _ENCODER.encode)(value) for value in values]


def _encoded(text: str) -> bytes:
    """JSON with the characters escaped that some readers take for line ends."""
    if not text.isascii():
        for mark, escape in _LINE_MARKS:
            text = text.replace(mark, escape)
    return text.encode()


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
    values = array_values(array)
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
