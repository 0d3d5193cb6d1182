"""Our own columns: their names, types and order, in segments and in the output."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from batchmla.errors import JobError

_IDS = pa.list_(pa.int32())
_CALLS = pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))

_FIELDS: tuple[tuple[str, pa.DataType, bool], ...] = (  # name, type, only with output.token_ids
    ("row_id", pa.string(), False),
    ("reasoning", pa.string(), False),
    ("content", pa.string(), False),
    ("tool_calls", _CALLS, False),
    ("finish_reason", pa.string(), False),
    ("reasoning_state", pa.string(), False),
    ("lossy", pa.bool_(), False),
    ("prompt_tokens", pa.int32(), False),
    ("cached_tokens", pa.int32(), False),
    ("reasoning_tokens", pa.int32(), False),
    ("content_tokens", pa.int32(), False),
    ("prompt_token_ids", _IDS, True),
    ("token_ids", _IDS, True),
    ("tool_error", pa.string(), False),
    ("error", pa.string(), False),
)
COUNTS = ("prompt_tokens", "cached_tokens", "reasoning_tokens", "content_tokens")


class Finished(NamedTuple):
    """A finished row: where it stands in the input and one value per column of ours."""

    row_index: int
    file: int
    number: int
    row_id: str
    reasoning: str | None = None
    content: str | None = None
    tool_calls: Sequence[dict[str, str]] | None = None
    finish_reason: str = "error"
    reasoning_state: str = "none"
    lossy: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    content_tokens: int = 0
    prompt_token_ids: Any = None  # int32 array, or None where output.token_ids is off
    token_ids: Any = None
    tool_error: str | None = None
    error: str | None = None


def own_schema(token_ids: bool, has_sample: bool = False) -> pa.Schema:
    """Our columns in order, unprefixed. `has_sample`: sampling.n is more than 1."""
    fields = [(name, kind) for name, kind, optional in _FIELDS if token_ids or not optional]
    if has_sample:
        fields.insert(1, ("sample", pa.int32()))
    return pa.schema(fields)


def with_sample(table: pa.Table, num_samples: int) -> pa.Table:
    """A table of finished rows with the column `sample`, which their index tells."""
    if num_samples == 1:
        return table
    sample = table.column("index").to_numpy() % num_samples
    return table.append_column("sample", pa.array(sample, pa.int32()))


def segment_schema(token_ids: bool) -> pa.Schema:
    """What a segment holds: the row's place in the input, then our columns."""
    place = [("index", pa.int64()), ("file", pa.int32()), ("number", pa.int64())]
    return pa.schema([*place, *own_schema(token_ids)])


def output_schema(
    carried: pa.Schema, prefix: str, token_ids: bool, has_sample: bool = False
) -> pa.Schema:
    """The carried columns as they are, then ours; a name in both is refused."""
    own = [field.with_name(prefix + field.name) for field in own_schema(token_ids, has_sample)]
    taken = set(carried.names)
    clashes = [field.name for field in own if field.name in taken]
    if clashes:
        raise JobError(
            f"input column {clashes[0]!r} has the name of an output column; set output.prefix "
            f"(e.g. output.prefix: model_), or leave the column out of input.columns"
        )
    return pa.schema([*carried, *own], metadata=carried.metadata)


def finished_table(rows: Sequence[Finished], token_ids: bool) -> pa.Table:
    """Rows as a table in `segment_schema`, in the order given."""
    schema = segment_schema(token_ids)
    columns = dict(zip(Finished._fields, zip(*rows, strict=True), strict=True))
    columns["index"] = columns["row_index"]
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)
