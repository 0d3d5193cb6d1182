"""CSV: records of cells under a line of names; quotes as in RFC 4180, commas between cells.

Cells have no types of their own. A column is whole numbers, numbers or true/false if every cell
that holds something is written as one; else it is text, as the file has it. An empty cell is null.
Blank lines are skipped. Ids are text, whatever the type of their column.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchmla.errors import JobError
from batchmla.jobs.input_file import InputFile
from batchmla.jobs.jsonl_types import NULL, Kind, KindName, merge, settle
from batchmla.jobs.lines import MAX_LINE_BYTES, CutShort, read_lines
from batchmla.jobs.text_form import BLOCK_ROWS, MalformedRecord, Record, RecordBlock

_INT = re.compile(r"0|-?[1-9][0-9]{0,19}")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*|(?=\.[0-9]))(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_TEXT = Kind(KindName.TEXT)
_FLOATS = Kind(KindName.FLOAT)
_BLOCK_BYTES = 8 << 20


class CsvForm:
    """Comma-separated files, each with a header."""

    name = "CSV"

    def blocks(self, file: InputFile) -> Iterator[RecordBlock]:
        """The records after the header; `data` are (header, cells, fault)."""
        row = num_bytes = 0
        held: list[Record] = []
        try:
            for record in _records(file):
                held.append(record)
                num_bytes += record.num_bytes
                if len(held) >= BLOCK_ROWS or num_bytes >= _BLOCK_BYTES:
                    yield _block(held)
                    row, num_bytes, held = row + len(held), 0, []
        except CutShort as cut:
            if held:
                yield _block(held)
            raise cut.as_error(file, row + len(held)) from None
        if held:
            yield _block(held)

    def parse(self, record: Record) -> tuple[dict[str, Any], str | None]:
        """The text of each cell, None for an empty one."""
        header, cells, fault = record.data
        if fault is not None:
            raise MalformedRecord(fault)
        if len(cells) != len(header):
            cells_word = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
            raise MalformedRecord(f"{cells_word} where the header names {len(header)} columns")
        return {name: cell or None for name, cell in zip(header, cells, strict=True)}, None

    def parse_all(self, block: RecordBlock) -> list[dict[str, Any]] | None:
        """The same of many."""
        if any(fault is not None or len(cells) != len(head) for head, cells, fault in block.data):
            return None
        return [
            {name: cell or None for name, cell in zip(header, cells, strict=True)}
            for header, cells, _ in block.data
        ]

    def default_id(self, files: tuple[InputFile, ...]) -> str | None:
        """`id` if the first header has it."""
        return "id" if "id" in self.first_kinds(files[:1]) else None

    def first_kinds(self, files: tuple[InputFile, ...]) -> dict[str, Kind]:
        """The columns of all headers, in the order of their first appearance."""
        kinds: dict[str, Kind] = {}
        for file in files:
            first = next(_raw_records(file), None)
            if first is not None:
                line, _, cells, fault = first
                kinds |= dict.fromkeys(_checked_header(file, line, cells, fault), NULL)
        return kinds

    def typed_id(self, values: Mapping[str, Any], column: str, error: str | None) -> str | int:
        """The cell's text."""
        value = values.get(column)
        if value is None:
            state = "empty" if column in values else "missing"
            raise MalformedRecord(f"the id column {column} is {state}")
        return str(value)

    def widen(self, kind: Kind, values: Sequence[Any]) -> Kind:
        """Whole numbers and numbers meet as numbers, all else as text."""
        for value in values:
            if kind.name is KindName.TEXT:
                return kind
            if value is not None:
                merged = merge(kind, _kind_of(value))
                kind = merged if merged.name is not KindName.JSON else _TEXT
        return kind

    def settle(self, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
        """Whole numbers beyond 64 bits are text; so is a column of empty cells."""
        settled = {name: settle(kind) for name, kind in kinds.items()}
        return {n: _TEXT if k.name is KindName.JSON else k for n, k in settled.items()}

    def fits(self, kind: Kind, values: Sequence[Any]) -> bool:
        """Whether cells can be read as their column's type."""
        return kind.name is KindName.TEXT or all(_fits(kind, value) for value in values)

    def row_values(self, kind: Kind | None, values: Sequence[Any]) -> Sequence[Any]:
        """The cells as their column's type."""
        if kind is None or kind.name is KindName.TEXT:
            return values
        return [_typed(kind, value) if _fits(kind, value) else value for value in values]

    def arrow_values(self, kind: Kind, values: Sequence[Any]) -> Sequence[Any]:
        """The cells as their column's type."""
        if kind.name is KindName.TEXT:
            return values
        return [_typed(kind, value) for value in values]


def _fits(kind: Kind, value: Any) -> bool:
    if value is None or kind.name is KindName.TEXT:
        return True
    own = _kind_of(value)
    if kind.name is KindName.INT:
        return own.name is KindName.INT and kind.low <= own.low <= kind.high
    return merge(kind, own) == kind


def _typed(kind: Kind, value: Any) -> Any:
    """A cell that fits, as its column's type."""
    if value is None or kind.name is KindName.TEXT:
        return value
    if kind.name is KindName.BOOL:
        return _BOOLS[value]
    return int(value) if kind.name is KindName.INT else float(value)


def _kind_of(text: str) -> Kind:
    """The narrowest kind of a cell that holds something."""
    if _INT.fullmatch(text):
        return Kind(KindName.INT, int(text), int(text))
    if text in _BOOLS:
        return Kind(KindName.BOOL)
    is_number = _FLOAT.fullmatch(text) is not None and abs(float(text)) != float("inf")
    return _FLOATS if is_number else _TEXT


class _Lines:
    """The lines of one file as the csv module wants them, with what it cannot say of a record."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._lines = read_lines(file)
        self.first_line = 0  # of the record being read
        self.num_bytes = 0
        self.fault: str | None = None

    def begin(self) -> None:
        """A new record follows."""
        self.first_line, self.num_bytes, self.fault = 0, 0, None

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        number, raw = next(self._lines)
        self.first_line = self.first_line or number
        self.num_bytes += len(raw)
        if self.num_bytes > MAX_LINE_BYTES:
            raise JobError(
                f"{self._file.path}:{self.first_line}: the record is longer than "
                f"{MAX_LINE_BYTES >> 20} MiB; is a quote left open?"
            )
        try:
            return raw.decode()
        except UnicodeDecodeError as fault:
            byte = raw[fault.start]
            self.fault = f"byte 0x{byte:02x} at position {fault.start} is not UTF-8"
            return raw.decode(errors="replace")


def _block(records: list[Record]) -> RecordBlock:
    return RecordBlock(
        records[0].row,
        [record.line for record in records],
        [record.num_bytes for record in records],
        [record.data for record in records],
    )


def _records(file: InputFile) -> Iterator[Record]:
    """The records after the header; blank lines are none."""
    header: tuple[str, ...] | None = None
    row = 0
    for line, num_bytes, cells, fault in _raw_records(file):
        if header is None:
            header = _checked_header(file, line, cells, fault)
        elif cells or fault:
            yield Record(row, line, num_bytes, (header, cells, fault))
            row += 1


def _raw_records(file: InputFile) -> Iterator[tuple[int, int, list[str], str | None]]:
    """(first line, bytes, cells, fault) of every record; blank lines have no cells."""
    lines = _Lines(file)
    csv.field_size_limit(MAX_LINE_BYTES)  # the module's own limit is 128 KiB a cell
    reader = csv.reader(lines, strict=True)
    while True:
        lines.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as fault:
            yield lines.first_line, lines.num_bytes, [], f"not valid CSV: {fault}"
            continue
        if cells or lines.fault:
            yield lines.first_line, lines.num_bytes, cells, lines.fault


def _checked_header(
    file: InputFile, line: int, cells: list[str], fault: str | None
) -> tuple[str, ...]:
    where = f"input file {file.path}, line {line}: the header"
    if fault is not None:
        raise JobError(f"{where} cannot be read: {fault}")
    if len(cells) == 1 and any(mark in cells[0] for mark in ";\t|"):
        raise JobError(f"{where} holds no comma; separate cells by commas")
    for position, name in enumerate(cells, start=1):
        if not name:
            raise JobError(
                f"{where} has no name for column {position}; name it, or write the file without "
                "an index"
            )
        if name in cells[: position - 1]:
            raise JobError(f"{where} names {name} twice; rename one")
    return tuple(cells)
