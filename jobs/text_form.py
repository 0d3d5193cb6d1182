"""What tells one text format from another: how files become records, and records values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from batchmla.jobs.input_file import InputFile
from batchmla.jobs.jsonl_types import Kind


class MalformedRecord(ValueError):
    """A record that is no row; the message is the second half of a sentence."""


@dataclass(frozen=True, slots=True)
class Record:
    """What may become a row: `row` counts from 0, `line` is its first line in the file, from 1."""

    row: int
    line: int
    num_bytes: int
    data: Any  # known to the form that made it


class TextForm(Protocol):
    """One text format. Values are JSON values, or for CSV the text of cells."""

    name: str  # for messages

    def records(self, file: InputFile) -> Iterator[Record]:
        """The records of a file in order; raises JobError where it cannot be read."""
        ...

    def parse(self, record: Record) -> tuple[dict[str, Any], str | None]:
        """The values of a record, and a sentence if the row fails although it is one.

        Raises MalformedRecord.
        """
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

    def widen(self, kind: Kind, value: Any) -> Kind:
        """`kind`, or the next wider one that also holds `value`."""
        ...

    def settle(self, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
        """The kinds as column types."""
        ...

    def fits(self, kind: Kind, value: Any) -> bool:
        """Whether a settled kind holds `value`."""
        ...

    def row_value(self, kind: Kind | None, value: Any) -> Any:
        """What prompts get for a value that fits; None: its column has no kind yet."""
        ...

    def arrow_value(self, kind: Kind, value: Any) -> Any:
        """What Arrow takes for a value that fits."""
        ...
