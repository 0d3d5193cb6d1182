"""Several samples of each row: an input in which every row comes `num_samples` times in succession.

To everything behind it a sample is a row of its own, with the index row index * num_samples +
sample, so that samples are finished, resumed and retried one by one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from batchmla.jobs.row import Row

if TYPE_CHECKING:
    from batchmla.jobs.seams import ScanResult, Table

_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Scanned:
    """A `ScanResult`."""

    num_rows: int | None


class SampledTable:
    """A `Table` over another."""

    def __init__(self, table: "Table", num_samples: int) -> None:
        self._table = table
        self._num_samples = num_samples

    @property
    def carried(self) -> pa.Schema:
        """As it is."""
        return self._table.carried

    def scan(self, mode: Literal["auto", "full"]) -> "ScanResult":
        """With the number of samples."""
        num_rows = self._table.scan(mode).num_rows
        return _Scanned(None if num_rows is None else num_rows * self._num_samples)

    def rows(
        self, start: int, limit: int | None, columns: Sequence[str] | None = None
    ) -> Iterator[list[Row]]:
        """Samples from index `start` on, at most `limit`."""
        end = None if limit is None else start + limit
        first, count = start // self._num_samples, None
        if end is not None:
            count = -(-end // self._num_samples) - first
        step = max(1, _BATCH_ROWS // self._num_samples)
        for rows in self._table.rows(first, count, columns):
            for place in range(0, len(rows), step):
                samples = [
                    sample
                    for row in rows[place : place + step]
                    for sample in self._samples(row)
                    if sample.index >= start and (end is None or sample.index < end)
                ]
                if samples:
                    yield samples

    def _samples(self, row: Row) -> Iterator[Row]:
        first = row.index * self._num_samples
        for sample in range(self._num_samples):
            yield row._replace(index=first + sample, sample=sample)

    def carried_batches(self, start: int) -> Iterator[pa.RecordBatch]:
        """Each row as often as it has samples."""
        first, skipped = divmod(start, self._num_samples)
        step = max(1, _BATCH_ROWS // self._num_samples)
        for batch in self._table.carried_batches(first):
            for place in range(0, batch.num_rows, step):
                part = batch.slice(place, step)
                order = np.repeat(np.arange(part.num_rows), self._num_samples)[skipped:]
                yield part.take(pa.array(order))
                skipped = 0

    def fingerprint(self) -> Mapping[str, str]:
        """As it is."""
        return self._table.fingerprint()

    def last_rows(self) -> str | None:
        """As they are."""
        return self._table.last_rows()

    def has_grown(self, name: str, was: str, was_rows: str | None) -> bool:
        """As it is."""
        return self._table.has_grown(name, was, was_rows)
