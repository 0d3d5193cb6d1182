"""The journal: which rows are finished, and their columns until a part holds them.

A row counts as done once a segment with it is on the disk. Two segments may hold the same row (a
run that was thought dead): the merge takes one and counts the other.
"""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchmla.errors import StorageError
from batchmla.jobs.columns import COUNTS, Finished, finished_table, segment_schema
from batchmla.jobs.done import DoneRows
from batchmla.jobs.kept_tables import KeptTables
from batchmla.jobs.ledger import Part, Tally
from batchmla.jobs.segments import (
    BadSegment,
    Segment,
    list_segments,
    read_segment,
    segment_name,
    write_segment,
)
from batchmla.jobs.store import Store, storage_errors

_UNPACKED = 4  # bytes in memory for a byte in a segment, about
_KEPT_BYTES = 64 << 20  # of segments that overlap several parts

_LOG = logging.getLogger(__name__)


def tally_of(table: pa.Table, is_counted: npt.NDArray[np.bool_] | None = None) -> Tally:
    """Sums over the rows of a table with our unprefixed columns."""
    if is_counted is not None and not is_counted.all():
        table = table.filter(pa.array(is_counted))
    sums = {name: pc.sum(table.column(name)).as_py() or 0 for name in COUNTS}
    failed = table.num_rows - table.column("error").null_count
    return Tally(rows=table.num_rows, failed=failed, **sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When what has gathered becomes a segment: whichever comes first."""

    rows: int = 4096
    num_bytes: int = 16 << 20
    wait_s: float = 3.0


class Journal:
    """Finished rows of one job. Used by one thread; `done` may be read by others."""

    def __init__(
        self,
        store: Store,
        *,
        job: str,
        token_ids: bool,
        pace: Pace,
        scores: Sequence[str] = (),
    ) -> None:
        self.done = DoneRows()
        self.tally = Tally()
        self.duplicates = 0
        self.round = 0  # of --retry-failed; 0 outside it
        self.folder = store.own / "segments"
        self.schema = segment_schema(token_ids, scores)
        self._store = store
        self._job = job
        self._token_ids = token_ids
        self._scores = tuple(scores)
        self._pace = pace
        self._segments: list[Segment] = []
        self._kept = KeptTables(_KEPT_BYTES)
        self._last_round = 0
        self._run = secrets.token_hex(4)
        self._num_written = 0
        self._rows: list[Finished] = []
        self._rows_bytes = 0
        self._oldest_s = 0.0

    def recover(self, parts: Sequence[Part]) -> None:
        """Takes up the rows of published parts and of every sound segment in the folder."""
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        for part in parts:
            self.done.mark_range(part.start, part.stop)
            self.tally.add(part.tally)
        for segment in list_segments(self.folder):
            table = self._read_or_warn(segment)
            if table is None:
                continue
            self._segments.append(segment)
            self._last_round = max(self._last_round, segment.round)
            indices = table.column("index").to_numpy()
            self.tally.add(tally_of(table, self.done.mark(indices)))

    def forget_failed(self, parts_failed: Iterator[pa.Table], limit: int | None) -> int:
        """Starts a round of retries: failed rows are to be done again. Returns how many.

        `parts_failed` holds the failed rows of the published parts: index, counts, error. Only rows
        with an index below `limit` are taken.
        """
        self.flush()
        self.round = self._last_round + 1
        num_failed = 0
        segments = self._segments
        for table in (*parts_failed, *(self._failed_in(segment) for segment in segments)):
            if limit is not None:
                table = table.filter(pc.less(table.column("index"), limit))
            indices = table.column("index").to_numpy()
            is_in = np.array([int(index) in self.done for index in indices], dtype=np.bool_)
            self.done.unmark(indices[is_in])
            self.tally.add(tally_of(table, is_in), sign=-1)
            num_failed += int(is_in.sum())
        return num_failed

    def add(self, row: Finished, row_bytes: int) -> None:
        """Takes a finished row; it is durable after the next flush."""
        if not self._rows:
            self._oldest_s = time.monotonic()
        self._rows.append(row)
        self._rows_bytes += row_bytes

    @property
    def is_full(self) -> bool:
        """Whether enough has gathered for a segment."""
        return len(self._rows) >= self._pace.rows or self._rows_bytes >= self._pace.num_bytes

    def is_due(self) -> bool:
        """Whether enough has gathered, or has waited long enough, for a segment."""
        if not self._rows:
            return False
        return self.is_full or time.monotonic() - self._oldest_s >= self._pace.wait_s

    def flush(self) -> None:
        """Writes what has gathered as one segment."""
        if not self._rows:
            return
        rows = sorted(self._rows, key=lambda row: row.row_index)
        name = segment_name(
            rows[0].row_index, rows[-1].row_index, self.round, self._run, self._num_written
        )
        table = finished_table(rows, self._token_ids, self._scores)
        segment = write_segment(self._store, self.folder, name, table, job=self._job)
        self._num_written += 1
        self._segments.append(segment)
        self._rows, self._rows_bytes = [], 0
        indices = np.fromiter((row.row_index for row in rows), dtype=np.int64, count=len(rows))
        is_new = self.done.mark(indices)
        assert is_new.all(), f"rows finished twice: {indices[~is_new].tolist()}"
        self.tally.add(_tally_of_rows(rows))

    def rows(self, start: int, stop: int, *, retries_only: bool = False) -> pa.Table:
        """The finished rows of start ≤ index < stop, each once, by index."""
        held = self._held(start, stop)
        tables = [
            self._slice(segment, start, stop)
            for segment in held
            if segment.round or not retries_only
        ]
        if not tables:
            return self.schema.empty_table()
        table = pa.concat_tables(tables)
        indices = table.column("index").to_numpy()
        order = np.argsort(indices, kind="stable")  # winners stay first among equals
        is_winner = np.diff(indices[order], prepend=-1) != 0
        self.duplicates += int(len(order) - is_winner.sum())
        return table.take(pa.array(order[is_winner]))

    def stored_bytes(self, start: int, stop: int) -> int:
        """About how many bytes of memory `rows(start, stop)` takes."""
        stored_bytes = 0.0
        for segment in self._held(start, stop):
            shared = min(stop, segment.last + 1) - max(start, segment.first)
            share = shared / (segment.last + 1 - segment.first)
            stored_bytes += segment.path.stat().st_size * share
        return int(stored_bytes * _UNPACKED)

    def pending_retries(self) -> list[Segment]:
        """Segments of retry rounds, which win over published parts."""
        return [segment for segment in self._segments if segment.round]

    def drop_published(self, stop: int, *, retries: bool = False) -> None:
        """Deletes every segment whose rows are all below `stop`, the end of the published parts.

        Files with a segment's name that this run never took up (damaged, or of a run thought dead)
        go too: the parts are the record. Retries go only with `retries`: the parts have them then.
        """

        def is_over(segment: Segment) -> bool:
            return segment.last < stop and (retries or not segment.round)

        dropped = [segment for segment in list_segments(self.folder) if is_over(segment)]
        for segment in dropped:
            self._store.remove(segment.path)
            self._kept.drop(segment.path)
        if dropped:
            self._store.sync_folder(self.folder)
        self._segments = [segment for segment in self._segments if not is_over(segment)]

    def _held(self, start: int, stop: int) -> list[Segment]:
        held = [segment for segment in self._segments if segment.overlaps(start, stop)]
        return sorted(held, key=lambda segment: segment.precedence)

    def _slice(self, segment: Segment, start: int, stop: int) -> pa.Table:
        table = self._kept.get(segment.path)
        if table is None:
            table = self._read(segment)
            if not start <= segment.first <= segment.last < stop:  # another part needs it, too
                self._kept.keep(segment.path, table)
        index = table.column("index").to_numpy()
        low, high = np.searchsorted(index, [start, stop])
        if high - low == table.num_rows:
            return table
        return table.take(pa.array(np.arange(low, high)))  # a copy: a slice would keep all of it

    def _failed_in(self, segment: Segment) -> pa.Table:
        table = self._slice(segment, segment.first, segment.last + 1)
        table = table.select(["index", *COUNTS, "error"])
        return table.filter(pc.is_valid(table.column("error")))

    def _read(self, segment: Segment) -> pa.Table:
        try:
            table = read_segment(segment, self.schema, self._job)
        except BadSegment as error:
            raise StorageError(
                f"{segment.path} could be read before and cannot any more ({error}); run the same "
                f"command again: its rows are done anew"
            ) from error
        return table.replace_schema_metadata(None)

    def _read_or_warn(self, segment: Segment) -> pa.Table | None:
        try:
            return read_segment(segment, self.schema, self._job)
        except BadSegment as error:
            _LOG.warning("%s is ignored, its rows are done again: %s", segment.path, error)
            return None


def _tally_of_rows(rows: Sequence[Finished]) -> Tally:
    return Tally(
        rows=len(rows),
        failed=sum(row.error is not None for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        cached_tokens=sum(row.cached_tokens for row in rows),
        reasoning_tokens=sum(row.reasoning_tokens for row in rows),
        content_tokens=sum(row.content_tokens for row in rows),
    )
