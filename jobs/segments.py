"""Segments: small immutable Parquet files of finished rows, sorted by index.

name   <first index>-<last index>.<round>.<run>-<number>.seg, all zero-padded
       (round: 0, then one more for every --retry-failed; run: random, so that two runs never meet)
schema metadata  batchmla.job = id of the job that made it
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchmla.errors import JobError
from batchmla.jobs.remote import files_in, whole_source
from batchmla.jobs.store import Store, storage_errors

_NAME = re.compile(r"(\d{12})-(\d{12})\.(\d{3})\.([0-9a-f]{8})-(\d{6})\.seg")
_JOB_KEY = b"batchmla.job"


class BadSegment(Exception):
    """The file is damaged, cut off or no segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One file, known by its name only."""

    path: Path
    first: int
    last: int
    round: int  # of --retry-failed

    @classmethod
    def of(cls, path: Path) -> "Segment | None":
        """The segment at `path`, or None when the name is not one of ours."""
        found = _NAME.fullmatch(path.name)
        if not found:
            return None
        first, last, round_ = (int(found[group]) for group in (1, 2, 3))
        return cls(path=path, first=first, last=last, round=round_)

    @property
    def precedence(self) -> tuple[int, str]:
        """Lower wins where two segments hold a row: the newest retry, then the lowest name."""
        return -self.round, self.path.name

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it may hold a row of start ≤ index < stop."""
        return self.first < stop and self.last >= start


def list_segments(folder: Path) -> list[Segment]:
    """Every file with a segment's name in `folder`, winners first."""
    with storage_errors(folder):
        found = [Segment.of(path) for path in files_in(folder)]
    return sorted((segment for segment in found if segment), key=lambda each: each.precedence)


def segment_name(first: int, last: int, round_: int, run: str, number: int) -> str:
    """`run` is 8 hex digits."""
    return f"{first:012d}-{last:012d}.{round_:03d}.{run}-{number:06d}.seg"


def write_segment(store: Store, folder: Path, name: str, rows: pa.Table, *, job: str) -> Segment:
    """Writes a `finished_table`, sorted by index, as one durable file."""
    table = rows.replace_schema_metadata({_JOB_KEY: job.encode()})
    with storage_errors(folder / name):
        pq.write_table(
            table,
            store.begin(name),
            compression="zstd",
            compression_level=1,
            write_statistics=False,
            use_dictionary=["finish_reason", "reasoning_state"],
            write_page_checksum=True,
        )
    store.publish(name, folder / name)
    segment = Segment.of(folder / name)
    assert segment is not None, name
    return segment


def read_segment(segment: Segment, schema: pa.Schema, job: str) -> pa.Table:
    """Every row of a segment, checksums verified.

    `BadSegment` when it is not what it says; a `JobError` when it is sound, but another job's.
    """
    try:
        file = pq.ParquetFile(whole_source(segment.path), page_checksum_verification=True)
        owner = (file.schema_arrow.metadata or {}).get(_JOB_KEY)
        if owner is None or not file.schema_arrow.equals(schema):
            raise BadSegment("it is no segment of this version")
        table = file.read(use_threads=False)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadSegment(reason) from error
    if owner != job.encode():
        raise JobError(
            f"{segment.path} belongs to another job ({owner.decode(errors='replace')}, this is "
            f"{job}); move it away, or use an output.path of its own for each job"
        )
    index = table.column("index").to_numpy()
    is_ordered = bool(np.all(np.diff(index) > 0))
    if not len(index) or index[0] != segment.first or index[-1] != segment.last or not is_ordered:
        raise BadSegment("its rows are not those of its name")
    return table
