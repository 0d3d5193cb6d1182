"""Arrow streams on disk: the shards of a saved data set. Mapped into memory, not read whole.

Columns come as Parquet keeps them (seconds as milliseconds). A type that Parquet has no form for,
such as a struct without fields, is text that holds JSON.
"""

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from batchmla.errors import JobError
from batchmla.jobs.input_file import InputFile, check_unchanged
from batchmla.jobs.json_values import json_values

_BATCH_BYTES = 8 << 20


class ArrowForm:
    """A `ColumnarForm`."""

    def describe(self, file: InputFile) -> tuple[int, pa.Schema]:
        """Counts rows batch by batch: an Arrow stream has no footer."""
        try:
            with pa.memory_map(file.path) as mapped, pa.ipc.open_stream(mapped) as stream:
                return sum(batch.num_rows for batch in stream), _storable(stream.schema)
        except (pa.ArrowException, OSError) as fault:
            raise _damaged(file, fault) from None

    def batches(
        self, file: InputFile, skipped: int, columns: Sequence[str], max_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Slices of the file's batches, of about 8 MiB at most."""
        check_unchanged(file)
        try:
            with pa.memory_map(file.path) as mapped, pa.ipc.open_stream(mapped) as stream:
                present = [name for name in stream.schema.names if name in set(columns)]
                wanted = _storable(stream.schema.empty_table().select(present).schema)
                for batch in stream:
                    if skipped >= batch.num_rows:
                        skipped -= batch.num_rows
                        continue
                    for part in _slices(batch.slice(skipped).select(present), max_rows):
                        yield _stored(part, wanted)
                    skipped = 0
        except (pa.ArrowException, OSError) as fault:
            raise _damaged(file, fault) from None


def _slices(batch: pa.RecordBatch, max_rows: int) -> Iterator[pa.RecordBatch]:
    row_bytes = batch.nbytes // max(batch.num_rows, 1)
    step = max(1, min(max_rows, _BATCH_BYTES // max(row_bytes, 1)))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _storable(schema: pa.Schema) -> pa.Schema:
    """The schema as Parquet keeps it; text for a type that Parquet has no form for."""
    return pa.schema([_storable_field(field) for field in schema], metadata=schema.metadata)


def _storable_field(field: pa.Field) -> pa.Field:
    schema = pa.schema([field])
    buffer = pa.BufferOutputStream()
    try:
        pq.write_table(schema.empty_table(), buffer)
    except pa.ArrowNotImplementedError:  # a struct without fields, an interval, ...
        return field.with_type(pa.string())
    kept = pq.read_schema(pa.BufferReader(buffer.getvalue())).field(0)
    return field.with_type(kept.type)


def _stored(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays: list[pa.Array] = []
    for column, field in zip(batch.columns, schema, strict=True):
        if column.type == field.type:
            arrays.append(column)
        elif types.is_nested(column.type) or types.is_interval(column.type):
            values = json_values(pa.chunked_array([column]))
            texts = [None if one is None else json.dumps(one, ensure_ascii=False) for one in values]
            arrays.append(pa.array(texts, pa.string()))
        else:
            arrays.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _damaged(file: InputFile, fault: Exception) -> JobError:
    reason = " ".join(str(fault).split())[:200]
    return JobError(f"input file {file.path} cannot be read as Arrow: {reason}; save it again")
