"""Files of records (JSONL, CSV, batch requests) as rows and as typed columns.

Types come from the first 500,000 rows or 256 MiB, or from all rows when everything is scanned: a
fixed amount, so that a rerun on a slower machine writes the same schema.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from batchmla.errors import JobError
from batchmla.jobs.ids import IdIndex
from batchmla.jobs.input_file import InputFile
from batchmla.jobs.jsonl_types import NULL, Kind, KindName, arrow_type
from batchmla.jobs.row import Row
from batchmla.jobs.source import ROW_NUMBER, Faults, RowBatch, Scan
from batchmla.jobs.text_form import MalformedRecord, Record, TextForm

_TYPED_ROWS = 500_000
_TYPED_BYTES = 256 << 20
_BATCH_ROWS = 1024
_BATCH_BYTES = 8 << 20
_ID_BATCH = 8192
_MAX_COLUMNS = 2000


@dataclass(slots=True)
class _Parsed:
    """A record with what was found in it; `values` are kept if only the id is unusable."""

    index: int
    file: int
    record: Record
    typed_id: str | int
    values: dict[str, Any]
    malformed: str | None = None  # why it is no row
    error: str | None = None  # why the row fails


class TextSource:
    """The files, the id column and, after a scan, the kind of every column."""

    def __init__(
        self,
        files: tuple[InputFile, ...],
        id_column: str | None,
        form: TextForm,
        *,
        typed_rows: int = _TYPED_ROWS,
    ) -> None:
        self._typed_rows = typed_rows
        self._files = list(files)
        self._form = form
        self.id_column = id_column if id_column is not None else form.default_id(files)
        if id_column == ROW_NUMBER:
            self.id_column = None
        self._kinds: dict[str, Kind] | None = None
        self._num_typed = 0  # rows that the kinds come from

    @property
    def files(self) -> tuple[InputFile, ...]:
        """The files; their rows are counted once a read has come to their end."""
        return tuple(self._files)

    @property
    def schema(self) -> pa.Schema:
        """All columns in the order of their first appearance."""
        assert self._kinds is not None, "the columns of text files are known after a scan"
        return pa.schema([pa.field(name, arrow_type(kind)) for name, kind in self._kinds.items()])

    def scan(self, ids: IdIndex, *, limit_s: float | None) -> Scan:
        """Parse lines for `limit_s` seconds and as far as types need; None: all of them."""
        scan = Scan()
        began_s = time.monotonic()
        kinds = self._form.first_kinds(self.files)
        seen_bytes = num_typed = 0
        is_typing = True
        batch: list[str | int] = []
        places: list[tuple[int, int]] = []  # file and line
        for parsed in self._parsed(0):
            scan.num_rows += 1
            seen_bytes += parsed.record.num_bytes
            is_enough = scan.num_rows > self._typed_rows or seen_bytes > _TYPED_BYTES
            if is_typing and limit_s is not None and is_enough:
                is_typing = False
                kinds = self._form.settle(kinds)
            if is_typing:
                num_typed = scan.num_rows
                for name, value in parsed.values.items():
                    kinds[name] = self._form.widen(kinds.get(name, NULL), value)
                if len(kinds) > _MAX_COLUMNS:
                    raise JobError(
                        f"{self._place(parsed)}: the rows so far have more than {_MAX_COLUMNS} "
                        "different keys; put free keys into an object under one key"
                    )
            elif parsed.malformed is None:
                parsed.malformed = self._misfit(kinds, parsed.values)
            if parsed.malformed is not None:
                scan.faults.add(f"{self._place(parsed)}: {parsed.malformed}")
            elif self.id_column is not None:
                batch.append(parsed.typed_id)
                places.append((parsed.file, parsed.record.line))
            if len(batch) >= _ID_BATCH:
                scan.add_ids(ids, batch, partial(self._shown, places))
                batch, places = [], []
            if is_typing or limit_s is None or scan.num_rows % 256:
                continue
            if time.monotonic() - began_s > limit_s:
                scan.is_complete = False
                break
        scan.add_ids(ids, batch, partial(self._shown, places))
        self._kinds = self._form.settle(kinds) if is_typing else kinds
        self._num_typed = num_typed
        return scan

    def _shown(self, places: list[tuple[int, int]], position: int) -> str:
        file, line = places[position]
        return f"{self._files[file].path}:{line}"

    def _place(self, parsed: _Parsed) -> str:
        return f"{self._files[parsed.file].path}:{parsed.record.line}"

    def _parsed(self, start: int) -> Iterator[_Parsed]:
        """Every record from row `start` on; those before it are counted, not parsed."""
        index = 0
        for number, file in enumerate(self._files):
            if file.num_rows is not None and index + file.num_rows <= start:
                index += file.num_rows
                continue
            first = index
            for record in self._form.records(file):
                index = first + record.row + 1
                if index > start:
                    yield self._parse(index - 1, number, record)
            if file.num_rows is None:
                self._files[number] = replace(file, num_rows=index - first)

    def _parse(self, index: int, file: int, record: Record) -> _Parsed:
        parsed = _Parsed(index, file, record, "", {})
        try:
            parsed.values, parsed.error = self._form.parse(record)
            if self.id_column is not None:
                parsed.typed_id = self._form.typed_id(parsed.values, self.id_column, parsed.error)
        except MalformedRecord as fault:
            parsed.typed_id = self._row_id(file, record)
            parsed.malformed = str(fault)
            return parsed
        if self.id_column is None:
            parsed.typed_id = self._row_id(file, record)
        if self._kinds is not None and index >= self._num_typed:
            parsed.malformed = self._misfit(self._kinds, parsed.values)
        return parsed

    def _row_id(self, file: int, record: Record) -> str:
        """The name of a row that brings none."""
        return f"{self._files[file].name}:{record.row}"

    def _misfit(self, kinds: dict[str, Kind], values: dict[str, Any]) -> str | None:
        """Why a row does not fit the types of the rows that decided them."""
        advice = "input.check: full takes the types from all rows"
        for name, value in values.items():
            kind = kinds.get(name)
            if kind is None:
                return (
                    f"the key {name} was in none of the rows that the columns come from; {advice}"
                )
            if not self._form.fits(kind, value):
                is_struct = kind.name is KindName.STRUCT
                words = "an object of known keys" if is_struct else kind.words()
                return f"the value of {name} is not {words} as in the rows before; {advice}"
        return None

    def places(self) -> Iterator[tuple[str | int, str]]:
        """Every readable id with the line that holds it."""
        for parsed in self._parsed(0):
            if parsed.malformed is None:
                yield parsed.typed_id, self._place(parsed)

    def rows(self, start: int, columns: Sequence[str] | None) -> Iterator[RowBatch]:
        """Rows from `start` on, at most 1024 or about 8 MiB of text in one batch."""
        batch = RowBatch([], [], [])
        num_bytes = 0
        for parsed in self._parsed(start):
            batch.rows.append(self._row(parsed, columns))
            if parsed.malformed is not None:
                batch.faults.append((parsed.index, f"{self._place(parsed)}: {parsed.malformed}"))
            if batch.lines is not None:
                batch.lines.append(parsed.record.line)
            num_bytes += parsed.record.num_bytes
            if len(batch.rows) >= _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
                yield batch
                batch = RowBatch([], [], [])
                num_bytes = 0
        if batch.rows:
            yield batch

    def _row(self, parsed: _Parsed, columns: Sequence[str] | None) -> Row:
        error = parsed.error
        if parsed.malformed is not None:
            error = f"malformed row at {self._place(parsed)}: {parsed.malformed}"
        values: dict[str, Any] = {}
        if error is None:
            kinds = self._kinds or {}
            wanted = columns if columns is not None else kinds or parsed.values
            convert = self._form.row_value
            values = {name: convert(kinds.get(name), parsed.values.get(name)) for name in wanted}
        return Row(
            index=parsed.index,
            file=parsed.file,
            number=parsed.record.row,
            id=str(parsed.typed_id),
            typed_id=parsed.typed_id,
            values=values,
            error=error,
        )

    def carried(self, schema: pa.Schema, start: int) -> Iterator[tuple[pa.RecordBatch, Faults]]:
        """The columns of `schema`; a malformed row has null in every column that does not fit."""
        assert self._kinds is not None, "the columns of text files are known after a scan"
        form = self._form
        unknown = form.settle({"": NULL})[""]
        kinds = {name: self._kinds.get(name, unknown) for name in schema.names}
        columns: list[list[Any]] = [[] for _ in kinds]
        faults = Faults()
        num_rows = 0
        num_bytes = 0
        for parsed in self._parsed(start):
            if parsed.malformed is not None:
                faults.add(f"{self._place(parsed)}: {parsed.malformed}")
            values = parsed.values
            if parsed.malformed is not None:  # what does not fit is null
                values = {n: v for n, v in values.items() if n in kinds and form.fits(kinds[n], v)}
            for column, (name, kind) in zip(columns, kinds.items(), strict=True):
                column.append(form.arrow_value(kind, values.get(name)))
            num_rows += 1
            num_bytes += parsed.record.num_bytes
            if num_rows >= _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
                yield _record_batch(columns, num_rows, schema), faults
                columns, faults = [[] for _ in kinds], Faults()
                num_rows = num_bytes = 0
        if num_rows:
            yield _record_batch(columns, num_rows, schema), faults


def _record_batch(columns: list[list[Any]], num_rows: int, schema: pa.Schema) -> pa.RecordBatch:
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
