"""One schema for many Parquet files: the first file's, widened only where no value changes."""

from collections.abc import Sequence

import pyarrow as pa
from pyarrow import types

from batchmla.errors import JobError


def unify(schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """The common schema of (path, schema) pairs; a real clash names both files and the column.

    Columns keep the order and the metadata of the file that has them first. A column that some
    file lacks is null there.
    """
    fields: dict[str, pa.Field] = {}
    first_path: dict[str, str] = {}
    for path, schema in schemas:
        names = schema.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise JobError(f"input file {path} has two columns named {twice}; rename one")
        for field in schema:
            known = fields.get(field.name)
            if known is None:
                fields[field.name] = field
                first_path[field.name] = path
            elif known.type != field.type or known.nullable != field.nullable:
                merged = _common_type(known.type, field.type)
                if merged is None:
                    raise JobError(
                        f"input column {field.name} is {known.type} in {first_path[field.name]} "
                        f"but {field.type} in {path}; write both files with one type"
                    )
                if merged != known.type:
                    first_path[field.name] = path  # the type is this file's
                is_nullable = known.nullable or field.nullable
                fields[field.name] = known.with_type(merged).with_nullable(is_nullable)
    for name, field in fields.items():
        if any(name not in schema.names for _, schema in schemas):
            fields[name] = field.with_nullable(True)
    return pa.schema(list(fields.values()), metadata=schemas[0][1].metadata)


def plain_type(dtype: pa.DataType) -> pa.DataType:
    """The type of the values: a dictionary's value type, a view's ordinary form."""
    if types.is_dictionary(dtype):
        return plain_type(dtype.value_type)
    if types.is_string_view(dtype):
        return pa.large_string()
    return pa.large_binary() if types.is_binary_view(dtype) else dtype


def _common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The narrowest type that holds the values of both exactly, or None.

    Where whole numbers of 64 bits meet doubles, their values have to be looked at.
    """
    if a == b:
        return a
    if types.is_null(a) or types.is_null(b):
        return b if types.is_null(a) else a
    candidates = [(a, b), (plain_type(a), plain_type(b))]
    for one, other in candidates:
        try:
            merged = pa.unify_schemas(
                [pa.schema([("x", one)]), pa.schema([("x", other)])], promote_options="permissive"
            )
        except (pa.ArrowTypeError, pa.ArrowInvalid):
            continue
        wide = merged.field(0).type
        both = (one, other)
        is_exact = all(_is_exact(each, wide) or meets_as_number(each, wide) for each in both)
        return wide if is_exact else None
    return None


def meets_as_number(whole: pa.DataType, wide: pa.DataType) -> bool:
    """Whether only whole numbers up to 2^53 of a type are the same as doubles."""
    return bool(types.is_integer(whole) and types.is_float64(wide) and whole.bit_width == 64)


def _is_exact(narrow: pa.DataType, wide: pa.DataType) -> bool:
    if narrow == wide:
        return True
    if types.is_integer(narrow) and types.is_integer(wide):
        if types.is_signed_integer(narrow) == types.is_signed_integer(wide):
            return bool(narrow.bit_width <= wide.bit_width)
        return bool(types.is_signed_integer(wide) and narrow.bit_width < wide.bit_width)
    if types.is_integer(narrow) and types.is_floating(wide):
        return bool(2 * narrow.bit_width <= wide.bit_width)
    if types.is_struct(narrow) and types.is_struct(wide):
        return all(_is_exact(field.type, wide.field(field.name).type) for field in narrow)
    if types.is_map(narrow) and types.is_map(wide):
        return narrow.key_type == wide.key_type and _is_exact(narrow.item_type, wide.item_type)
    if _is_list(narrow) and _is_list(wide):
        return _is_exact(narrow.value_type, wide.value_type)
    return True


def _is_list(dtype: pa.DataType) -> bool:
    is_one = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(dtype) for test in is_one)


def python_type(dtype: pa.DataType) -> pa.DataType:
    """`dtype` with nanoseconds as microseconds: what Python's own dates and times can hold."""
    if types.is_timestamp(dtype) and dtype.unit == "ns":
        return pa.timestamp("us", dtype.tz)
    if types.is_duration(dtype) and dtype.unit == "ns":
        return pa.duration("us")
    if types.is_time64(dtype) and dtype.unit == "ns":
        return pa.time64("us")
    if types.is_list(dtype):
        return pa.list_(dtype.value_field.with_type(python_type(dtype.value_type)))
    if types.is_large_list(dtype):
        return pa.large_list(dtype.value_field.with_type(python_type(dtype.value_type)))
    if types.is_struct(dtype):
        return pa.struct([field.with_type(python_type(field.type)) for field in dtype])
    if types.is_map(dtype):
        return pa.map_(dtype.key_type, dtype.item_field.with_type(python_type(dtype.item_type)))
    return python_type(plain_type(dtype)) if types.is_dictionary(dtype) else dtype
