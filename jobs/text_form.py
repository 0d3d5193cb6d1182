"""What tells one text format from another: how files become records, and records values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchmla.jobs.input_file import InputFile
from batchmla.jobs.jsonl_types import Kind

BLOCK_ROWS = 1024


class MalformedRecord(ValueError):
    """A record that is no row; the message is the second half of a sentence."""


@dataclass(frozen=True, slots=True)
class Record:
    """What may become a row: `row` counts from 0, `line` is its first line in the file, from 1."""

    row: int
    line: int
    num_bytes: int
    data: Any  # known to the form that made it


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Up to 1024 consecutive records of a file, of which the first is `row`."""

    row: int
    lines: Sequence[int]
    sizes: Sequence[int]  # in bytes
    data: Sequence[Any]

    def __len__(self) -> int:
        return len(self.data)

    def records(self) -> Iterator[Record]:
        """One by one."""
        each = zip(self.lines, self.sizes, self.data, strict=True)
        for row, (line, num_bytes, data) in enumerate(each, start=self.row):
            yield Record(row, line, num_bytes, data)

    def behind(self, count: int) -> "RecordBlock":
        """Those after the first `count`."""
        return RecordBlock(
            self.row + count, self.lines[count:], self.sizes[count:], self.data[count:]
        )


class TextForm(Protocol):
    """One text format. Values are JSON values, or for CSV the text of cells."""

    name: str  # for messages

    def blocks(self, file: InputFile) -> Iterator[RecordBlock]:
        """The records of a file in order; raises JobError where it cannot be read."""
        ...

    def parse(self, record: Record) -> tuple[dict[str, Any], str | None]:
        """The values of a record, and a sentence if the row fails although it is one.

        Raises MalformedRecord.
        """
        ...

    def parse_all(self, block: RecordBlock) -> list[dict[str, Any]] | None:
        """What `parse` gives for every record, where nothing has to be said of any; else None."""
        ...

    def default_id(self, files: tuple[InputFile, ...]) -> str | None:
        """The column that names rows where the job names none."""
        ...

    def first_kinds(self, files: tuple[InputFile, ...]) -> dict[str, Kind]:
        """The columns that are known before the first row."""
        ...

    def typed_id(self, values: Mapping[str, Any], column: str, error: str | None) -> str | int:
        """The id of a row. Raises MalformedRecord."""
        ...

    def widen(self, kind: Kind, values: Sequence[Any]) -> Kind:
        """`kind`, or the next wider one that also holds `values`."""
        ...

    def settle(self, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
        """The kinds as column types."""
        ...

    def fits(self, kind: Kind, values: Sequence[Any]) -> bool:
        """Whether a settled kind holds all `values`."""
        ...

    def row_values(self, kind: Kind | None, values: Sequence[Any]) -> Sequence[Any]:
        """What prompts get for values that fit; None: their column has no kind yet."""
        ...

    def arrow_values(self, kind: Kind, values: Sequence[Any]) -> Sequence[Any]:
        """What Arrow takes for values that fit."""
        ...
