"""One Arrow type for a column of JSON values, widened value by value.

Whole and fractional numbers meet as double where no whole number is beyond 2^53; lists and structs
merge inside. A column in which anything else meets at any depth (text and numbers, an object and a
list) becomes a string column of JSON text, so that no value is lost or changed; so do a column of
nulls and objects without keys.
NaN among values that are no numbers is what pandas writes for a missing one: null.
"""

import json
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import pyarrow as pa

_EXACT_IN_DOUBLE = 2**53
_MAX_FIELDS = 256  # a struct with more is taken for a map with free keys
_MAX_DEPTH = 16


class KindName(Enum):
    """What a JSON value is, or a column of them."""

    NULL = auto()
    NAN = auto()  # nothing but NaN so far
    BOOL = auto()
    INT = auto()
    FLOAT = auto()
    TEXT = auto()
    LIST = auto()
    STRUCT = auto()
    JSON = auto()  # text that holds JSON


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of the values seen so far."""

    name: KindName
    low: int = 0  # INT: the range
    high: int = 0
    item: "Kind | None" = None  # LIST
    fields: tuple[tuple[str, "Kind"], ...] = ()  # STRUCT

    def words(self) -> str:
        """For messages."""
        return {"INT": "a whole number", "FLOAT": "a number", "BOOL": "true or false"}.get(
            self.name.name, {"STRUCT": "an object", "LIST": "a list"}.get(self.name.name, "text")
        )


_ENCODER = json.JSONEncoder(ensure_ascii=False)

NULL = Kind(KindName.NULL)
JSON = Kind(KindName.JSON)
_NAN = Kind(KindName.NAN)
_BOOL = Kind(KindName.BOOL)
_FLOAT = Kind(KindName.FLOAT)
_TEXT = Kind(KindName.TEXT)
_UINT = Kind(KindName.INT, 0, 2**64 - 1)


def kind_of(value: Any, depth: int = 0) -> Kind:
    """The narrowest kind of one JSON value."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return Kind(KindName.INT, value, value)
    if isinstance(value, float):
        return _NAN if value != value else _FLOAT
    if isinstance(value, str):
        return _TEXT
    if depth >= _MAX_DEPTH:
        return JSON
    if isinstance(value, list):
        item = NULL
        for one in value:
            item = widen(item, one, depth + 1)
        return Kind(KindName.LIST, item=item)
    fields = tuple((key, kind_of(one, depth + 1)) for key, one in value.items())
    return Kind(KindName.STRUCT, fields=fields) if len(fields) <= _MAX_FIELDS else JSON


def widen(kind: Kind, value: Any, depth: int = 0) -> Kind:
    """`kind`, or the next wider one that also holds `value`."""
    if value is None or kind.name is KindName.JSON:
        return kind
    if isinstance(value, str) and kind.name is KindName.TEXT:
        return kind
    if type(value) is int and kind.name is KindName.INT and kind.low <= value <= kind.high:
        return kind
    return merge(kind, kind_of(value, depth))


def merge(a: Kind, b: Kind) -> Kind:
    """The narrowest kind that holds both."""
    if a == b or b.name is KindName.NULL:
        return a
    if a.name is KindName.NULL:
        return b
    if KindName.NAN in (a.name, b.name):
        other = b if a.name is KindName.NAN else a
        is_number = other.name in (KindName.NULL, KindName.INT, KindName.FLOAT)
        return merge(_FLOAT, other) if is_number else other
    names = {a.name, b.name}
    if names == {KindName.INT}:
        return Kind(KindName.INT, min(a.low, b.low), max(a.high, b.high))
    if names == {KindName.INT, KindName.FLOAT}:
        whole = a if a.name is KindName.INT else b
        is_exact = whole.low >= -_EXACT_IN_DOUBLE and whole.high <= _EXACT_IN_DOUBLE
        return _FLOAT if is_exact else JSON
    if names == {KindName.LIST}:
        return Kind(KindName.LIST, item=merge(a.item or NULL, b.item or NULL))
    if names == {KindName.STRUCT}:
        fields = dict(a.fields)
        for key, kind in b.fields:
            fields[key] = merge(fields.get(key, NULL), kind)
        if len(fields) <= _MAX_FIELDS:
            return Kind(KindName.STRUCT, fields=tuple(fields.items()))
    return JSON


def settle(kind: Kind) -> Kind:
    """The kind as a column type: open ends closed, ranges grown to those of int64 or uint64."""
    if is_mixed(kind):
        return JSON
    if kind.name is KindName.INT:
        is_signed = kind.low >= -(2**63) and kind.high < 2**63
        return Kind(KindName.INT, -(2**63), 2**63 - 1) if is_signed else _UINT
    if kind.name is KindName.LIST:
        return replace(kind, item=settle(kind.item or NULL))
    if kind.name is KindName.STRUCT and kind.fields:
        return replace(kind, fields=tuple((key, settle(one)) for key, one in kind.fields))
    if kind.name is KindName.NAN:
        return _FLOAT
    return JSON if kind.name in (KindName.NULL, KindName.STRUCT) else kind


def is_mixed(kind: Kind) -> bool:
    """Whether values met anywhere in it that no type but text holds, such as 1 and "1" or 2^64."""
    if kind.name is KindName.INT:
        return kind.high >= 2**64 or kind.low < (0 if kind.high >= 2**63 else -(2**63))
    if kind.name is KindName.LIST and kind.item is not None:
        return is_mixed(kind.item)
    return kind.name is KindName.JSON or any(is_mixed(one) for _, one in kind.fields)


def fits(kind: Kind, value: Any) -> bool:
    """Whether a settled kind holds `value`."""
    if value is None or kind.name is KindName.JSON or value != value:
        return True
    if kind.name is KindName.INT:
        return type(value) is int and kind.low <= value <= kind.high
    if kind.name is KindName.FLOAT:
        return type(value) is float or (type(value) is int and abs(value) <= _EXACT_IN_DOUBLE)
    if kind.name is KindName.LIST:
        item = kind.item or NULL
        return isinstance(value, list) and all(fits(item, one) for one in value)
    if kind.name is KindName.STRUCT:
        fields = dict(kind.fields)
        return isinstance(value, dict) and all(
            key in fields and fits(fields[key], one) for key, one in value.items()
        )
    return isinstance(value, bool if kind.name is KindName.BOOL else str)


def to_arrow_value(kind: Kind, value: Any) -> Any:
    """What Arrow takes for a value that fits."""
    if value is None or (value.__class__ is str and kind.name is KindName.TEXT):
        return value
    if value != value and kind.name is not KindName.FLOAT:
        return None
    if kind.name is KindName.JSON:
        return _ENCODER.encode(value)
    if kind.name is KindName.FLOAT:
        return float(value)
    if kind.name is KindName.LIST:
        return [to_arrow_value(kind.item or NULL, one) for one in value]
    if kind.name is KindName.STRUCT:
        return {key: to_arrow_value(one, value.get(key)) for key, one in kind.fields}
    return value


def arrow_type(kind: Kind) -> pa.DataType:
    """The Arrow type of a settled kind."""
    if kind.name is KindName.LIST:
        return pa.list_(arrow_type(kind.item or NULL))
    if kind.name is KindName.STRUCT:
        return pa.struct([pa.field(key, arrow_type(one)) for key, one in kind.fields])
    if kind.name is KindName.INT:
        return pa.uint64() if kind.high >= 2**63 else pa.int64()
    plain = {KindName.BOOL: pa.bool_(), KindName.FLOAT: pa.float64()}
    return plain.get(kind.name, pa.string())
