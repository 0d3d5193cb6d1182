"""Files of records (JSONL, CSV, batch requests) as rows and as typed columns.

Types come from the first 500,000 rows or 256 MiB, or from all rows when everything is scanned: a
fixed amount, so that a rerun on a slower machine writes the same schema. A block of records of
which nothing has to be said is handled as a whole, any other one record by record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from batchmla.jobs.ids import IdIndex
from batchmla.jobs.input_file import InputFile
from batchmla.jobs.jsonl_types import NULL, Kind, arrow_type
from batchmla.jobs.row import Row, make_rows
from batchmla.jobs.source import ROW_NUMBER, Faults, RowBatch, Scan
from batchmla.jobs.text_form import BLOCK_ROWS, MalformedRecord, Record, RecordBlock, TextForm
from batchmla.jobs.text_rows import Clean, Parsed, misfit
from batchmla.jobs.text_scan import TextScan

_TYPED_ROWS = 500_000
_BATCH_BYTES = 8 << 20
_CLOCK_ROWS = 256


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
        """Parse records for `limit_s` seconds and as far as types need; None: all of them."""
        self._kinds, self._num_typed = None, 0
        look = TextScan(
            self._form,
            self._form.first_kinds(self.files),
            None if self.id_column is None else ids,
            self._place,
            typed_rows=self._typed_rows,
            limit_s=limit_s,
        )
        is_complete = all(self._is_scanned(look, *each) for each in self._blocks(0))
        found = look.end(is_complete=is_complete)
        self._kinds, self._num_typed = look.kinds, look.num_typed
        return found

    def _is_scanned(self, look: TextScan, number: int, index: int, block: RecordBlock) -> bool:
        """Looks at a block; false once the time is up."""
        clean = self._clean(number, index, block)
        if clean is None or not look.takes(clean):
            for parsed in self._parsed(number, index, block):
                look.take(parsed)
                if look.found.num_rows % _CLOCK_ROWS == 0 and look.is_over():
                    return False
        return not look.is_over()

    def _place(self, file: int, line: int) -> str:
        return f"{self._files[file].path}:{line}"

    def _blocks(self, start: int) -> Iterator[tuple[int, int, RecordBlock]]:
        """(file, index of the first row, block) from row `start` on; what is before is counted."""
        index = 0
        for number, file in enumerate(self._files):
            if file.num_rows is not None and index + file.num_rows <= start:
                index += file.num_rows
                continue
            first = index
            for block in self._form.blocks(file):
                at = first + block.row
                index = at + len(block)
                if index > start:
                    skipped = max(start - at, 0)
                    yield number, at + skipped, block.behind(skipped) if skipped else block
            if file.num_rows is None:
                self._files[number] = replace(file, num_rows=index - first)

    def _clean(self, number: int, index: int, block: RecordBlock) -> Clean | None:
        """The block as a whole, if every record of it is a row that fits."""
        values = self._form.parse_all(block)
        if values is None:
            return None
        ids: Sequence[Any]
        if self.id_column is None:
            name = self._files[number].name
            ids = [f"{name}:{row}" for row in range(block.row, block.row + len(block))]
        else:
            ids = [each.get(self.id_column) for each in values]
            if set(map(type, ids)) - {str, int}:
                return None
        clean = Clean(index, number, block, ids, values)
        is_typed = self._kinds is None or index + len(block) <= self._num_typed
        return clean if is_typed or clean.fits(self._form, self._kinds or {}) else None

    def _parsed(self, number: int, index: int, block: RecordBlock) -> Iterator[Parsed]:
        for offset, record in enumerate(block.records()):
            yield self._parse(number, index + offset, record)

    def _parse(self, file: int, index: int, record: Record) -> Parsed:
        parsed = Parsed(index, file, record, "", {})
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
            parsed.malformed = misfit(self._form, self._kinds, parsed.values)
        return parsed

    def _row_id(self, file: int, record: Record) -> str:
        """The name of a row that brings none."""
        return f"{self._files[file].name}:{record.row}"

    def places(self) -> Iterator[tuple[str | int, str]]:
        """Every readable id with the line that holds it."""
        for number, index, block in self._blocks(0):
            clean = self._clean(number, index, block)
            if clean is not None:
                for typed_id, line in zip(clean.ids, block.lines, strict=True):
                    yield typed_id, self._place(number, line)
                continue
            for parsed in self._parsed(number, index, block):
                if parsed.malformed is None:
                    yield parsed.typed_id, self._place(number, parsed.record.line)

    def rows(self, start: int, columns: Sequence[str] | None) -> Iterator[RowBatch]:
        """Rows from `start` on, at most 1024 or about 8 MiB of text in one batch."""
        batch, num_bytes = RowBatch([], [], []), 0
        for number, index, block in self._blocks(start):
            block_bytes = sum(block.sizes)
            is_full = len(batch.rows) + len(block) > BLOCK_ROWS
            if batch.rows and (is_full or num_bytes + block_bytes > _BATCH_BYTES):
                yield batch
                batch, num_bytes = RowBatch([], [], []), 0
            self._add_rows(batch, number, index, block, columns)
            num_bytes += block_bytes
        if batch.rows:
            yield batch

    def _add_rows(
        self,
        batch: RowBatch,
        number: int,
        index: int,
        block: RecordBlock,
        columns: Sequence[str] | None,
    ) -> None:
        assert batch.lines is not None
        batch.lines.extend(block.lines)
        kinds = self._kinds or {}
        wanted = columns if columns is not None else list(kinds)
        clean = self._clean(number, index, block) if columns is not None or kinds else None
        if clean is not None:
            values = [self._form.row_values(kinds.get(n), clean.column(n)) for n in wanted]
            batch.rows.extend(make_rows(index, number, block.row, clean.ids, wanted, values))
            return
        for parsed in self._parsed(number, index, block):
            if parsed.malformed is not None:
                place = self._place(number, parsed.record.line)
                batch.faults.append((parsed.index, f"{place}: {parsed.malformed}"))
            batch.rows.append(self._row(parsed, columns))

    def _row(self, parsed: Parsed, columns: Sequence[str] | None) -> Row:
        error = parsed.error
        if parsed.malformed is not None:
            place = self._place(parsed.file, parsed.record.line)
            error = f"malformed row at {place}: {parsed.malformed}"
        values: dict[str, Any] = {}
        if error is None:
            kinds = self._kinds or {}
            wanted = columns if columns is not None else kinds or parsed.values
            convert = self._form.row_values
            values = {n: convert(kinds.get(n), (parsed.values.get(n),))[0] for n in wanted}
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
        unknown = self._form.settle({"": NULL})[""]
        kinds = {name: self._kinds.get(name, unknown) for name in schema.names}
        columns: list[list[Any]] = [[] for _ in kinds]
        faults = Faults()
        num_rows = num_bytes = 0
        for number, index, block in self._blocks(start):
            block_bytes = sum(block.sizes)
            is_full = num_rows + len(block) > BLOCK_ROWS
            if num_rows and (is_full or num_bytes + block_bytes > _BATCH_BYTES):
                yield _record_batch(columns, num_rows, schema), faults
                columns, faults = [[] for _ in kinds], Faults()
                num_rows = num_bytes = 0
            found = self._columns(number, index, block, kinds, faults)
            for column, (name, kind) in zip(columns, kinds.items(), strict=True):
                column.extend(self._form.arrow_values(kind, found[name]))
            num_rows += len(block)
            num_bytes += block_bytes
        if num_rows:
            yield _record_batch(columns, num_rows, schema), faults

    def _columns(
        self, number: int, index: int, block: RecordBlock, kinds: dict[str, Kind], faults: Faults
    ) -> dict[str, list[Any]]:
        """The values of a block by column, without those that do not fit."""
        clean = self._clean(number, index, block)
        if clean is not None:
            return {name: clean.column(name) for name in kinds}
        found: dict[str, list[Any]] = {name: [] for name in kinds}
        for parsed in self._parsed(number, index, block):
            values = parsed.values
            if parsed.malformed is not None:
                faults.add(f"{self._place(number, parsed.record.line)}: {parsed.malformed}")
                fits = self._form.fits
                values = {n: v for n, v in values.items() if n in kinds and fits(kinds[n], (v,))}
            for name, column in found.items():
                column.append(values.get(name))
        return found


def _record_batch(columns: list[list[Any]], num_rows: int, schema: pa.Schema) -> pa.RecordBatch:
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
