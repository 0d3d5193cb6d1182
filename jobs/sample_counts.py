"""How many samples each row of the input has, and so which rows of the output are whose.

One number for all, or one of each row, from a column that is read as a whole before weights load:
two bytes a row are kept.
"""

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from batchmla.errors import JobError
from batchmla.jobs.row import Row
from batchmla.jobs.sampling_values import BadValue, NumberRule
from batchmla.jobs.settings import ColumnRef

if TYPE_CHECKING:
    from batchmla.jobs.manifest import HasGrown, Manifest
    from batchmla.jobs.seams import Table

MOST_SAMPLES = 2**16 - 1
_RULE = NumberRule(
    1, lambda v: 1 <= v <= MOST_SAMPLES and v == int(v), f"a whole number from 1 to {MOST_SAMPLES}"
)
_BLOCK_ROWS = 1024

Numbers = npt.NDArray[np.int64]


class Samples(Protocol):
    """Rows of the output are counted by `index`, those of the input by `row`."""

    @property
    def most(self) -> int:
        """Of one row."""
        ...

    def total(self, num_rows: int | None) -> int | None:
        """All samples of an input with so many rows; None where that is not known."""
        ...

    def before(self, row: int) -> int:
        """The samples of all rows before `row`: the index of its first one."""
        ...

    def locate(self, index: int) -> tuple[int, int]:
        """The row of the input that `index` is a sample of, and which."""
        ...

    def of_rows(self, first: int, stop: int) -> Numbers:
        """How many each of the rows first ≤ row < stop has."""
        ...

    def numbers(self, indices: Numbers) -> Numbers:
        """Which sample of its row each index is; `indices` are rising."""
        ...


@dataclass(frozen=True, slots=True)
class EvenSamples:
    """Every row has `each`."""

    each: int

    @property
    def most(self) -> int:
        return self.each

    def total(self, num_rows: int | None) -> int | None:
        return None if num_rows is None else num_rows * self.each

    def before(self, row: int) -> int:
        return row * self.each

    def locate(self, index: int) -> tuple[int, int]:
        return divmod(index, self.each)

    def of_rows(self, first: int, stop: int) -> Numbers:
        return np.full(stop - first, self.each, np.int64)

    def numbers(self, indices: Numbers) -> Numbers:
        return indices % self.each


class ListedSamples:
    """Every row has its own number; one whose number is bad counts once, and is an error."""

    def __init__(self, counts: npt.NDArray[np.uint16]) -> None:
        """0 stands for a bad number."""
        self._counts = counts
        starts = range(0, len(counts), _BLOCK_ROWS)
        sums = [int(self.of_rows(start, start + _BLOCK_ROWS).sum()) for start in starts]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sums, dtype=np.int64)])

    @property
    def most(self) -> int:
        return max(1, int(self._counts.max(initial=1)))

    def total(self, num_rows: int | None) -> int:
        return int(self._starts[-1])

    def is_bad(self, row: int) -> bool:
        """Whether the row's number cannot be taken."""
        return bool(self._counts[row] == 0)

    def before(self, row: int) -> int:
        row = min(row, len(self._counts))
        block = row // _BLOCK_ROWS
        return int(self._starts[block] + self.of_rows(block * _BLOCK_ROWS, row).sum())

    def locate(self, index: int) -> tuple[int, int]:
        if index >= self._starts[-1]:
            return len(self._counts), index - int(self._starts[-1])
        block = int(np.searchsorted(self._starts, index, side="right")) - 1
        first = block * _BLOCK_ROWS
        ends = self._starts[block] + np.cumsum(self.of_rows(first, first + _BLOCK_ROWS))
        place = int(np.searchsorted(ends, index, side="right"))
        before = int(ends[place - 1]) if place else int(self._starts[block])
        return first + place, index - before

    def of_rows(self, first: int, stop: int) -> Numbers:
        counts: Numbers = np.maximum(self._counts[first:stop], 1).astype(np.int64)
        return counts

    def numbers(self, indices: Numbers) -> Numbers:
        if not len(indices):
            return indices
        first, last = (self.locate(int(index))[0] for index in (indices[0], indices[-1]))
        counts = self.of_rows(first, last + 1)
        starts = self.before(first) + np.cumsum(counts) - counts
        return indices - starts[np.searchsorted(starts, indices, side="right") - 1]


def read_samples(given: int | ColumnRef, table: "Table") -> Samples | None:
    """The numbers of a job, None where every row has one; those of a column are read from the first
    row to the last.
    """
    if isinstance(given, int):
        return None if given == 1 else EvenSamples(given)
    counts = array("H")
    for rows in table.rows(0, None, [given.column]):
        counts.extend(_count_of(row, given.column) for row in rows)
    return ListedSamples(np.frombuffer(counts, np.uint16))


def _count_of(row: Row, column: str) -> int:
    value = row.values.get(column)
    if type(value) is int and 1 <= value <= MOST_SAMPLES:
        return value
    if row.error is not None or value is None or value != value:
        return 1
    try:
        return int(_RULE.read("", value))
    except BadValue:
        return 0


def fault_of(row: Row, column: str) -> str:
    """Why the row's number cannot be taken."""
    try:
        _RULE.read(f"sampling.n from column {column!r}", row.values.get(column))
    except BadValue as fault:
        return str(fault)
    return "sampling.n: the input was changed while the job ran"


def refuse_other_counts(
    was: "Manifest", now: "Manifest", has_grown: "HasGrown", output: Path
) -> None:
    """Raises where an input file, by its fingerprints, is not what it was with rows added at its
    end: other numbers before a finished row would give it to another one.
    """
    for name, fingerprint in was.input.items():
        if now.input.get(name) != fingerprint and not has_grown(name, fingerprint, was.last_rows):
            raise JobError(
                f"{output}: input file {name} was changed, and its column for sampling.n says "
                "which rows of the output are whose: set it back, start over with --fresh, or "
                "choose another output.path"
            )
