"""Our own columns: their names, types and order, in segments and in the output."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from batchmla.core import Logprobs
from batchmla.errors import JobError
from batchmla.jobs.sample_counts import Samples

_IDS = pa.list_(pa.int32())
_CALLS = pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))

_SCORE = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
_SCORES = pa.list_(pa.list_(_SCORE))
SCORES = ("logprobs", "prompt_logprobs")  # columns that are there only when asked for

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
    ("logprobs", _SCORES, False),
    ("prompt_logprobs", _SCORES, False),
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
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error: str | None = None


def own_schema(token_ids: bool, has_sample: bool = False, scores: Sequence[str] = ()) -> pa.Schema:
    """Our columns in order, unprefixed. `has_sample`: sampling.n is not 1; `scores`: which of
    `SCORES` are asked for.
    """
    fields = [
        (name, kind)
        for name, kind, optional in _FIELDS
        if (token_ids or not optional) and (name not in SCORES or name in scores)
    ]
    if has_sample:
        fields.insert(1, ("sample", pa.int32()))
    return pa.schema(fields)


def with_sample(table: pa.Table, samples: Samples | None) -> pa.Table:
    """A table of finished rows, by index, with the column `sample`, which their index tells."""
    if samples is None:
        return table
    sample = samples.numbers(table.column("index").to_numpy())
    return table.append_column("sample", pa.array(sample, pa.int32()))


def segment_schema(token_ids: bool, scores: Sequence[str] = ()) -> pa.Schema:
    """What a segment holds: the row's place in the input, then our columns."""
    place = [("index", pa.int64()), ("file", pa.int32()), ("number", pa.int64())]
    return pa.schema([*place, *own_schema(token_ids, scores=scores)])


def output_schema(
    carried: pa.Schema,
    prefix: str,
    token_ids: bool,
    has_sample: bool = False,
    scores: Sequence[str] = (),
) -> pa.Schema:
    """The carried columns as they are, then ours; a name in both is refused."""
    ours = own_schema(token_ids, has_sample, scores)
    own = [field.with_name(prefix + field.name) for field in ours]
    taken = set(carried.names)
    clashes = [field.name for field in own if field.name in taken]
    if clashes:
        raise JobError(
            f"input column {clashes[0]!r} has the name of an output column; set output.prefix "
            f"(e.g. output.prefix: model_), or leave the column out of input.columns"
        )
    return pa.schema([*carried, *own], metadata=carried.metadata)


def finished_table(
    rows: Sequence[Finished], token_ids: bool, scores: Sequence[str] = ()
) -> pa.Table:
    """Rows as a table in `segment_schema`, in the order given."""
    schema = segment_schema(token_ids, scores)
    columns = dict(zip(Finished._fields, zip(*rows, strict=True), strict=True))
    columns["index"] = columns["row_index"]
    arrays = [
        scores_array(columns[field.name])
        if field.name in SCORES
        else pa.array(columns[field.name], type=field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def scores_array(rows: Sequence[Logprobs | None]) -> pa.Array:
    """A column of log-probabilities; a position without entries is null."""
    there = [row for row in rows if row is not None]
    counts = [np.diff(row.ends, prepend=0) for row in there]
    ids = np.concatenate([np.empty(0, np.int32), *(row.token_ids for row in there)])
    values = np.concatenate([np.empty(0, np.float32), *(row.values for row in there)])
    entries = pa.StructArray.from_arrays([pa.array(ids), pa.array(values)], fields=list(_SCORE))
    counts_P = np.concatenate([np.empty(0, np.int64), *counts])
    positions = pa.ListArray.from_arrays(
        pa.array(_ends(counts_P), pa.int32()), entries, mask=pa.array(counts_P == 0)
    )
    num_positions = np.array([0 if row is None else len(row.ends) for row in rows], np.int64)
    is_null = pa.array([row is None for row in rows], pa.bool_())
    made = pa.ListArray.from_arrays(
        pa.array(_ends(num_positions), pa.int32()), positions, mask=is_null
    )
    return made.cast(_SCORES)


def _ends(counts: Any) -> Any:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
