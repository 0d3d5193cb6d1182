"""Files of typed columns (Parquet, the shards of a saved dataset) as rows and as those columns."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from batchmla.errors import JobError
from batchmla.jobs.array_values import array_values
from batchmla.jobs.ids import IdIndex
from batchmla.jobs.input_file import InputFile
from batchmla.jobs.parquet_schema import meets_as_number, plain_type, python_type, unify
from batchmla.jobs.row import Row, make_rows
from batchmla.jobs.source import ROW_NUMBER, Faults, RowBatch, Scan
from batchmla.jobs.unique import DistinctIds

_MAX_BATCH_ROWS = 1024
_ID_BATCH = 8192
_DISTINCT_BATCH = 1 << 16
_EXACT = 2**53  # doubles hold all whole numbers up to here
_UNREADABLE = object()  # a value that Python has no form for


class ColumnarForm(Protocol):
    """One format of such files."""

    def describe(self, file: InputFile) -> tuple[int, pa.Schema]:
        """Number of rows and columns. Raises JobError where the file cannot be read."""
        ...

    def batches(
        self, file: InputFile, skipped: int, columns: Sequence[str], max_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Batches after `skipped` rows; a column that the file lacks is left out."""
        ...


class ColumnarSource:
    """The files with their row counts, one schema over all of them, the id column."""

    def __init__(
        self, files: tuple[InputFile, ...], id_column: str | None, form: ColumnarForm
    ) -> None:
        schemas: list[tuple[str, pa.Schema]] = []
        counted: list[InputFile] = []
        for file in files:
            num_rows, schema = form.describe(file)
            counted.append(replace(file, num_rows=num_rows))
            if not schemas or not schema.equals(schemas[-1][1], check_metadata=True):
                schemas.append((file.path, schema))
        self._form = form
        self.files = tuple(counted)
        self.schema = unify(schemas)
        self._check_wholes(schemas)
        self.id_column = id_column
        if id_column is None and "id" in self.schema.names:
            self.id_column = "id"
        if id_column == ROW_NUMBER:
            self.id_column = None
        self._check_id()

    def _check_wholes(self, schemas: list[tuple[str, pa.Schema]]) -> None:
        """Refuse whole numbers that cannot become the doubles of another file."""
        widened = {
            field.name
            for _, schema in schemas
            for field in schema
            if meets_as_number(field.type, self.schema.field(field.name).type)
        }
        for number, file in enumerate(self.files) if widened else ():
            for batch in self._batches(number, 0, sorted(widened), _ID_BATCH):
                for name in batch.schema.names:
                    low, high = pc.min_max(batch.column(name)).as_py().values()
                    if low is not None and not -_EXACT <= low <= high <= _EXACT:
                        raise JobError(
                            f"input column {name} is {batch.column(name).type} in {file.path} with "
                            f"values beyond 2^53 and double in another file; write both with one "
                            "type"
                        )

    def _check_id(self) -> None:
        if self.id_column is None or self.id_column not in self.schema.names:
            return
        dtype = plain_type(self.schema.field(self.id_column).type)
        is_text = types.is_string(dtype) or types.is_large_string(dtype)
        if not (is_text or types.is_integer(dtype) or types.is_null(dtype)):
            raise JobError(
                f"the id column {self.id_column} is {dtype} in {self.files[0].path}; ids are text "
                "or whole numbers: name another column in input.id or write it as one of these"
            )

    def scan(self, ids: IdIndex, *, limit_s: float | None) -> Scan:
        """Read the id column of every file, whatever the limit; without one all columns."""
        scan = Scan()
        scan.num_rows = sum(file.num_rows or 0 for file in self.files)
        for number in range(len(self.files)) if limit_s is None else ():
            for _ in self._batches(number, 0, self.schema.names, _MAX_BATCH_ROWS):
                pass  # a damaged page raises
        if self.id_column is None or self._has_distinct_ids(self.id_column):
            return scan
        for file, row, values in self._id_batches():
            offsets = [offset for offset, one in enumerate(values) if _is_id(one)]
            if len(offsets) < len(values):
                for offset, one in enumerate(values):
                    if not _is_id(one):
                        scan.faults.add(self._no_id(file, row + offset))
                values = [values[offset] for offset in offsets]
            scan.add_ids(ids, values, partial(_place_of, file, row, offsets))
        return scan

    def _has_distinct_ids(self, column: str) -> bool:
        """Whether every row certainly has an id of its own; false: whoever asks looks closer."""
        distinct = DistinctIds()
        for number in range(len(self.files)):
            for batch in self._batches(number, 0, [column], _DISTINCT_BATCH):
                if column not in batch.schema.names or not distinct.add(_plain(batch, column)):
                    return False
        return distinct.are_distinct()

    def _id_batches(self) -> Iterator[tuple[InputFile, int, list[Any]]]:
        """(file, number of the first row, ids) of every batch."""
        assert self.id_column is not None
        for number, file in enumerate(self.files):
            row = 0
            for batch in self._batches(number, 0, [self.id_column], _ID_BATCH):
                yield file, row, _column(batch, self.id_column)[0]
                row += batch.num_rows

    def _no_id(self, file: InputFile, row: int) -> str:
        return f"{_place(file, row)}: the id column {self.id_column} is null or unreadable"

    def places(self) -> Iterator[tuple[str | int, str]]:
        """Every id with its file and row."""
        for file, row, values in self._id_batches() if self.id_column is not None else ():
            for offset, one in enumerate(values):
                if _is_id(one):
                    yield one, _place(file, row + offset)

    def rows(self, start: int, columns: Sequence[str] | None) -> Iterator[RowBatch]:
        """Rows from `start` on; whole files and row groups before it are not read."""
        wanted = list(self.schema.names if columns is None else columns)
        ids = [] if self.id_column is None or self.id_column in wanted else [self.id_column]
        for number, first, skipped in self._files_from(start):
            row = skipped
            for batch in self._batches(number, skipped, wanted + ids, _MAX_BATCH_ROWS):
                yield self._row_batch(batch, number, first, row, wanted)
                row += batch.num_rows

    def _row_batch(
        self, batch: pa.RecordBatch, number: int, first: int, row: int, wanted: list[str]
    ) -> RowBatch:
        file = self.files[number]
        found = {name: _column(batch, name) for name in wanted}
        data = {name: values for name, (values, _) in found.items()}
        partly = [name for name, (_, is_readable) in found.items() if not is_readable]
        id_values: list[Any] = []
        are_readable = True
        if self.id_column is None:
            id_values = [f"{file.name}:{row + offset}" for offset in range(batch.num_rows)]
        else:
            known = found.get(self.id_column) or _column(batch, self.id_column)
            id_values, are_readable = known
        if not partly and are_readable and None not in id_values:
            columns = list(data.values())
            rows = make_rows(first + row, number, row, id_values, list(data), columns)
            return RowBatch(rows, [])
        return self._faulty_batch(data, partly, id_values, number, first, row)

    def _faulty_batch(
        self,
        data: dict[str, list[Any]],
        partly: list[str],
        id_values: list[Any],
        number: int,
        first: int,
        row: int,
    ) -> RowBatch:
        """Rows of which some have no id, or an unreadable value in one of the columns `partly`."""
        file = self.files[number]
        made = RowBatch([], [])
        columns = zip(*data.values(), strict=True) if data else iter([()] * len(id_values))
        names = tuple(data)
        for offset, (typed_id, one) in enumerate(zip(id_values, columns, strict=True)):
            values = dict(zip(names, one, strict=True))
            error: str | None = None
            if not _is_id(typed_id):
                sentence = self._no_id(file, row + offset)
                made.faults.append((first + row + offset, sentence))
                error = f"malformed row at {sentence}"
                typed_id = f"{file.name}:{row + offset}"
            elif partly:
                error = _unreadable(partly, values)
            made.rows.append(
                Row(
                    index=first + row + offset,
                    file=number,
                    number=row + offset,
                    id=str(typed_id),
                    typed_id=typed_id,
                    values=values if error is None else {},
                    error=error,
                )
            )
        return made

    def carried(self, schema: pa.Schema, start: int) -> Iterator[tuple[pa.RecordBatch, Faults]]:
        """The columns of `schema` with its types; a malformed row keeps its values."""
        for number, _, skipped in self._files_from(start):
            for batch in self._batches(number, skipped, schema.names, _ID_BATCH):
                yield _fitted(batch, schema, self.files[number]), Faults()

    def _files_from(self, start: int) -> Iterator[tuple[int, int, int]]:
        """(file, index of its first row, rows of it to skip) for the files from row `start` on."""
        first = 0
        for number, file in enumerate(self.files):
            assert file.num_rows is not None
            if first + file.num_rows > start:
                yield number, first, max(start - first, 0)
            first += file.num_rows

    def _batches(
        self, number: int, skipped: int, columns: Sequence[str], max_rows: int
    ) -> Iterator[pa.RecordBatch]:
        return self._form.batches(self.files[number], skipped, columns, max_rows)


def _is_id(value: Any) -> bool:
    return value is not None and value is not _UNREADABLE


def _unreadable(names: list[str], values: dict[str, Any]) -> str | None:
    """What is wrong with the first of the columns that is not readable in this row."""
    broken = next((name for name in names if values[name] is _UNREADABLE), None)
    if broken is None:
        return None
    return f"column {broken} holds a value that cannot be read as text or a number"


def _place_of(file: InputFile, row: int, offsets: list[int], position: int) -> str:
    return _place(file, row + offsets[position])


def _place(file: InputFile, row: int) -> str:
    return f"{file.path}, row {row} (counted from 0)"


def _column(batch: pa.RecordBatch, name: str) -> tuple[list[Any], bool]:
    """A column as Python values, and whether all can be ones; what cannot is `_UNREADABLE`.

    A missing column is null.
    """
    if name not in batch.schema.names:
        return [None] * batch.num_rows, True
    column = batch.column(name)
    target = python_type(column.type)
    try:
        if target != column.type:
            column = column.cast(target, safe=False)
        return array_values(column), True
    except (ValueError, OverflowError, pa.ArrowException):
        values = [_value(column[row]) for row in range(len(column))]
    return values, all(value is not _UNREADABLE for value in values)


def _plain(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column without dictionaries and views."""
    column = batch.column(name)
    target = plain_type(column.type)
    return column if target == column.type else column.cast(target)


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="lossy")
    except (ValueError, OverflowError, pa.ArrowException):
        return _UNREADABLE


def _fitted(batch: pa.RecordBatch, schema: pa.Schema, file: InputFile) -> pa.RecordBatch:
    """The batch under the common schema of all files."""
    if not len(schema):
        return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
    arrays: list[pa.Array] = []
    for field in schema:
        if field.name not in batch.schema.names:
            arrays.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as fault:
                reason = " ".join(str(fault).split())[:200]
                raise JobError(
                    f"input column {field.name} of {file.path} cannot become {field.type}, its "
                    f"type in the other files: {reason}"
                ) from None
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
