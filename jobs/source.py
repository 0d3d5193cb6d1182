"""What a format offers the input table: a scan, rows, and the carried columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from batchmla.jobs.ids import IdIndex
from batchmla.jobs.input_file import InputFile
from batchmla.jobs.row import Row

ROW_NUMBER = "row_number"  # as input.id: rows are known by their place, whatever columns there are
MAX_LISTED = 20  # faults spelled out in one message


@dataclass(slots=True)
class Faults:
    """Malformed rows: the first ones as sentences, all of them as a count."""

    count: int = 0
    listed: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        self.count += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(sentence)

    def text(self, noun: str) -> str:
        """All of them as lines under one head line."""
        rest = self.count - len(self.listed)
        more = [f"and {rest} more"] if rest else []
        head = f"the input has {self.count} {noun}{'' if self.count == 1 else 's'}"
        return "\n  ".join([f"{head}:", *self.listed, *more])


@dataclass(slots=True)
class Scan:
    """What a look at the input found before any weight is loaded."""

    num_rows: int = 0  # looked at
    is_complete: bool = True
    faults: Faults = field(default_factory=Faults)
    repeats: list[tuple[str | int, str]] = field(default_factory=list)  # id and its later place
    num_repeats: int = 0

    def add_ids(
        self, index: IdIndex, ids: Sequence[str | int], place_of: Callable[[int], str]
    ) -> None:
        """Note which of `ids` repeat an earlier one; `place_of` words a position among them."""
        for position in index.add(ids):
            self.num_repeats += 1
            if len(self.repeats) < MAX_LISTED:
                self.repeats.append((ids[position], place_of(position)))


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows in order; `faults` holds (row index, sentence) of those that are malformed.

    `lines` are the rows' 1-based lines in their files, of formats that have lines.
    """

    rows: list[Row]
    faults: list[tuple[int, str]]
    lines: list[int] | None = None


class Source(Protocol):
    """The files of one format."""

    @property
    def files(self) -> tuple[InputFile, ...]: ...

    @property
    def id_column(self) -> str | None: ...

    @property
    def schema(self) -> pa.Schema:
        """All columns; of JSONL known after `scan`."""
        ...

    def scan(self, ids: IdIndex, *, limit_s: float | None) -> Scan:
        """Look at what is needed before a run; None: at everything."""
        ...

    def places(self) -> Iterator[tuple[str | int, str]]:
        """Every readable id with its place, from the first row."""
        ...

    def rows(self, start: int, columns: Sequence[str] | None) -> Iterator[RowBatch]:
        """Rows from index `start` on, with the values of `columns` (None: of all)."""
        ...

    def carried(self, schema: pa.Schema, start: int) -> Iterator[tuple[pa.RecordBatch, Faults]]:
        """The columns of `schema` from row `start` on, with the malformed rows among them."""
        ...
