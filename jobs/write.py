"""The writer: parts in input order, each published as a whole once all its rows are done.

Carried columns come from a second, sequential reading of the input, our columns from the journal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchmla.errors import JobError, StorageError
from batchmla.jobs.columns import COUNTS, output_schema, own_schema, with_sample
from batchmla.jobs.journal import Journal, tally_of
from batchmla.jobs.ledger import Ledger, Part, Tally
from batchmla.jobs.part_file import JsonlParts, LineForm, ParquetParts, PartFile, PlainLines
from batchmla.jobs.sample_counts import Samples
from batchmla.jobs.store import Store, storage_errors

GROUP_BYTES = 64 << 20  # of our columns in memory while a part is written


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFormat:
    """What a part looks like. `lines` are the rows of output.format openai_batch."""

    carried: pa.Schema
    prefix: str
    token_ids: bool
    rows_per_file: int
    compression: str
    format: Literal["parquet", "jsonl", "openai_batch"] = "parquet"
    lines: LineForm | None = None
    has_sample: bool = False
    samples: Samples | None = None  # known once the input was counted
    scores: Sequence[str] = ()

    @property
    def own(self) -> pa.Schema:
        """Our columns, unprefixed."""
        return own_schema(self.token_ids, self.has_sample, self.scores)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the output."""
        if self.format == "openai_batch":
            return self.own
        return output_schema(
            self.carried, self.prefix, self.token_ids, self.has_sample, self.scores
        )

    @property
    def ending(self) -> str:
        """Of the names of parts."""
        return "parquet" if self.format == "parquet" else "jsonl"

    def file(self) -> PartFile:
        """How a part is written and read."""
        own = self.own
        if self.format == "parquet":
            return ParquetParts(self.schema, own, self.prefix, self.compression)
        return JsonlParts(own, self.lines or PlainLines(own, self.prefix))


class Carried:
    """The carried columns, read once from front to back."""

    def __init__(
        self, schema: pa.Schema, batches: Callable[[int], Iterator[pa.RecordBatch]]
    ) -> None:
        self._schema = schema
        self._open = batches
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._at: int | None = None  # index of the next row

    def take(self, start: int, count: int) -> pa.Table:
        """Rows start ≤ index < start + count."""
        if self._at != start:
            self._batches, self._rest, self._at = self._open(start), None, start
        taken: list[pa.RecordBatch] = []
        wanted = count
        while wanted:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise JobError(
                    f"the input ends after {start + count - wanted} rows on its second reading "
                    f"and had more before; it was changed while the job ran: use --fresh"
                )
            head = batch.slice(0, wanted)
            self._rest = batch.slice(wanted) if batch.num_rows > wanted else None
            wanted -= head.num_rows
            taken.append(head)
        self._at = start + count
        return pa.Table.from_batches(taken, schema=self._schema)


@dataclass(kw_only=True)
class Writer:
    """Publishes parts, in order, one after the other."""

    store: Store
    ledger: Ledger
    journal: Journal
    form: PartFormat
    carried: Carried
    parts: list[Part] = field(default_factory=list)  # there and sound, by number
    _holes: list[Part] = field(default_factory=list)  # were there, are lost

    def take_up(self, found: Sequence[tuple[Part, bool]]) -> None:
        """Starts from the parts of earlier runs."""
        self.parts = [part for part, is_sound in found if is_sound]
        self._holes = [part for part, is_sound in found if not is_sound]

    @property
    def stop(self) -> int:
        """Every row below it is in a published part."""
        if self._holes:
            return self._holes[0].start
        return self.parts[-1].stop if self.parts else 0

    def is_complete(self, num_rows: int) -> bool:
        """Whether parts hold all `num_rows` rows; a job without rows has one empty part."""
        return bool(self.parts) and self.stop >= num_rows

    def advance(self, end: int | None, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Publishes every part that can be; `end`, once known, cuts the last one short."""
        while not is_stopping() and (part := self._next(end)):
            tally = self._write(part, self._all_groups(part))
            self._publish(part, tally)
            self.journal.drop_published(self.stop)

    def apply_retries(self) -> Tally:
        """Rewrites the parts that retried rows belong to. Returns what that changes in the sums."""
        change = Tally()
        pending = self.journal.pending_retries()
        for part in list(self.parts):
            if not any(segment.overlaps(part.start, part.stop) for segment in pending):
                continue
            retried = self.journal.rows(part.start, part.stop, retries_only=True)
            if retried.num_rows:
                tally = self._write(part, self._retried_groups(part, retried))
                change.add(part.tally, sign=-1)
                change.add(tally)
                self._publish(part, tally)
        if pending:
            self.journal.drop_published(self.stop, retries=True)
        return change

    def failed_rows(self) -> Iterator[pa.Table]:
        """The failed rows of each published part: index, counts, error."""
        for part in self.parts:
            if not part.tally.failed:
                continue
            path = self.store.root / part.name
            with _reading(path):
                table = self.form.file().own(path, [*COUNTS, "error"])
            index = pa.array(np.arange(part.start, part.stop, dtype=np.int64))
            table = table.append_column("index", index)
            yield table.filter(pc.is_valid(table.column("error")))

    def _next(self, end: int | None) -> Part | None:
        """The part to be written now, if all its rows are done."""
        if self._holes:
            hole = self._holes[0]
            return hole if self.journal.done.first_missing() >= hole.stop else None
        start, number = self.stop, len(self.parts)
        if self.parts and self.parts[-1].stop - self.parts[-1].start < self.form.rows_per_file:
            start, number = self.parts[-1].start, number - 1  # a short last part grows
        stop = start + self.form.rows_per_file
        if end is not None:
            stop = min(stop, end)
        if stop <= self.stop and not (end == 0 and not self.parts):
            return None
        if self.journal.done.first_missing() < stop:
            return None
        return Part(number=number, start=start, stop=max(stop, start), ending=self.form.ending)

    def _all_groups(self, part: Part) -> Iterator[tuple[pa.Table, pa.Table]]:
        """(carried, ours) of a part: from its published file as far as that goes, then new ones."""
        if self._holes or part.start == self.stop:
            yield from self._groups(part)
            return
        short = self.parts[-1]
        assert short.number == part.number, f"part {part.number} grows, the last is {short.number}"
        yield from self._published_groups(short)
        yield from self._groups(replace(part, start=short.stop))

    def _groups(self, part: Part) -> Iterator[tuple[pa.Table, pa.Table]]:
        """(carried, ours) for consecutive ranges of a part, each small enough for memory."""
        num_rows = part.stop - part.start
        num_groups = 1 + self.journal.stored_bytes(part.start, part.stop) // GROUP_BYTES
        group_rows = max(1, -(-num_rows // num_groups))
        for start in range(part.start, part.stop, group_rows):
            stop = min(start + group_rows, part.stop)
            own = self.journal.rows(start, stop)
            if own.num_rows != stop - start:
                raise StorageError(
                    f"{self.journal.folder}: segments with rows of {start}-{stop - 1} have gone "
                    f"while the job ran; run the same command again: these rows are done anew"
                )
            own = with_sample(own, self.form.samples)
            yield self.carried.take(start, stop - start), own

    def _published_groups(self, part: Part) -> Iterator[tuple[pa.Table, pa.Table]]:
        """(carried, ours) of a published part; what the file has no types of is read again."""
        path, start = self.store.root / part.name, part.start
        with _reading(path):
            for kept, own in self.form.file().read(path):
                carried = kept if kept is not None else self.carried.take(start, own.num_rows)
                yield carried, own
                start += own.num_rows

    def _retried_groups(self, part: Part, retried: pa.Table) -> Iterator[tuple[pa.Table, pa.Table]]:
        """(carried, ours) of a published part with the retried rows in place of the old ones."""
        retried_index = retried.column("index").to_numpy()
        retried = with_sample(retried, self.form.samples).select(self.form.own.names)
        start = part.start
        for carried, old in self._published_groups(part):
            low, high = np.searchsorted(retried_index, [start, start + old.num_rows])
            order = np.arange(old.num_rows)
            order[retried_index[low:high] - start] = old.num_rows + np.arange(high - low)
            both = pa.concat_tables([old, retried.slice(int(low), int(high - low))])
            yield carried, both.take(pa.array(order))
            start += old.num_rows

    def _write(self, part: Part, groups: Iterator[tuple[pa.Table, pa.Table]]) -> Tally:
        """Writes the part aside and returns the sums of its rows."""
        tally = Tally()

        def counted() -> Iterator[tuple[pa.Table, pa.Table]]:
            for carried, own in groups:
                tally.add(tally_of(own))
                yield carried, own

        with storage_errors(self.store.root / part.name):
            self.form.file().write(self.store.begin(part.name), counted())
        return tally

    def _publish(self, part: Part, tally: Tally) -> None:
        part = self.ledger.announce(replace(part, tally=tally), self.store.aside / part.name)
        self.store.publish(part.name, self.store.root / part.name)
        if self._holes and self._holes[0].number == part.number:
            self._holes.pop(0)
        self.parts = [each for each in self.parts if each.number != part.number] + [part]
        self.parts.sort(key=lambda each: each.number)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A part of ours that cannot be read any more is the storage's fault, and is named."""
    try:
        yield
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StorageError(
            f"{path} could be read before and cannot any more ({reason}); run the same command "
            f"again: its rows are done anew"
        ) from error
