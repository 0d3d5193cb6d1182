"""Several samples of rows: an input in which every row comes as often as it has samples.

To everything behind it a sample is a row of its own, with an index that counts all samples before
it, so that samples are finished, resumed and retried one by one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from batchmla.errors import JobError
from batchmla.jobs.row import Row
from batchmla.jobs.sample_counts import ListedSamples, Numbers, Samples, fault_of, read_samples
from batchmla.jobs.settings import ColumnRef

if TYPE_CHECKING:
    from batchmla.jobs.seams import ScanResult, Table

_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Scanned:
    """A `ScanResult`."""

    num_rows: int | None


def sampled(table: "Table", given: int | ColumnRef) -> tuple["Table", Samples | None]:
    """The input with the samples that sampling.n asks for, and their numbers; None: one each."""
    samples = read_samples(given, table)
    if samples is None:
        return table, None
    column = given.column if isinstance(given, ColumnRef) else None
    return SampledTable(table, samples, column), samples


class SampledTable:
    """A `Table` over another; `column` is where rows bring their numbers of samples, if they do."""

    def __init__(self, table: "Table", samples: Samples, column: str | None = None) -> None:
        self._table = table
        self._samples = samples
        self._column = column

    @property
    def carried(self) -> pa.Schema:
        """As it is."""
        return self._table.carried

    def scan(self, mode: Literal["auto", "full"]) -> "ScanResult":
        """With the number of samples."""
        return _Scanned(self._samples.total(self._table.scan(mode).num_rows))

    def rows(
        self, start: int, limit: int | None, columns: Sequence[str] | None = None
    ) -> Iterator[list[Row]]:
        """Samples from index `start` on, at most `limit`."""
        if limit == 0:
            return
        first, count, end = self._samples.locate(start)[0], None, None
        if limit is not None:
            end = start + limit
            count = self._samples.locate(end - 1)[0] - first + 1
        if columns is not None and self._column is not None:
            columns = list(dict.fromkeys([*columns, self._column]))
        for rows in self._table.rows(first, count, columns):
            yield from self._batches(rows, start, end)

    def _batches(self, rows: list[Row], start: int, end: int | None) -> Iterator[list[Row]]:
        """The samples of rows in succession with start ≤ index < end."""
        first = rows[0].index
        index = self._samples.before(first)
        counts = self._counts(first, first + len(rows)).tolist()
        batch: list[Row] = []
        for row, count in zip(rows, counts, strict=True):
            checked = self._checked(row)
            stop = count if end is None else min(count, end - index)
            for sample in range(max(0, start - index), stop):
                batch.append(checked._replace(index=index + sample, sample=sample))
                if len(batch) == _BATCH_ROWS:
                    yield batch
                    batch = []
            index += count
        if batch:
            yield batch

    def _counts(self, first: int, stop: int) -> Numbers:
        """Of the rows first ≤ row < stop, which have been counted before."""
        counts = self._samples.of_rows(first, stop)
        if len(counts) < stop - first:
            raise JobError(
                "the input has more rows than when it was first read: it was changed while the job "
                "ran; run the same command again"
            )
        return counts

    def _checked(self, row: Row) -> Row:
        """With its error, if its number of samples is bad."""
        if self._column is None or not isinstance(self._samples, ListedSamples):
            return row
        if not self._samples.is_bad(row.index):
            return row
        return row._replace(error=fault_of(row, self._column))

    def carried_batches(self, start: int) -> Iterator[pa.RecordBatch]:
        """Each row as often as it has samples."""
        row, skipped = self._samples.locate(start)
        step = max(1, _BATCH_ROWS // self._samples.most)
        for batch in self._table.carried_batches(row):
            for place in range(0, batch.num_rows, step):
                part = batch.slice(place, step)
                counts = self._counts(row, row + part.num_rows)
                order = np.repeat(np.arange(part.num_rows), counts)[skipped:]
                yield part.take(pa.array(order))
                row, skipped = row + part.num_rows, 0

    def fingerprint(self) -> Mapping[str, str]:
        """As it is."""
        return self._table.fingerprint()

    def last_rows(self) -> str | None:
        """As they are."""
        return self._table.last_rows()

    def has_grown(self, name: str, was: str, was_rows: str | None) -> bool:
        """As it is."""
        return self._table.has_grown(name, was, was_rows)
