"""What the finished rows of an output add up to: lengths, endings and errors, part by part.

Memory is bounded whatever the number of rows: only the columns that are counted are read, some
thousand rows at a time, and only so many kinds of errors are told apart.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchmla.errors import JobError
from batchmla.jobs.columns import own_schema
from batchmla.jobs.done import DoneRows
from batchmla.jobs.journal import tally_of
from batchmla.jobs.ledger import Ledger, Part, Tally
from batchmla.jobs.manifest import Manifest
from batchmla.jobs.openai_lines import BatchLines
from batchmla.jobs.part_file import JsonlParts, LineForm, PlainLines
from batchmla.jobs.remote import parquet_source, whole_source
from batchmla.jobs.remote_store import store_at
from batchmla.jobs.segments import BadSegment, list_segments, read_segment

EXAMPLES = 3  # rows shown of each kind of error
ERROR_CHARS = 200  # of an error that are shown
_MOST_KINDS = 500
_MOST_TOKENS = 1 << 22  # longer rows are counted as this long where lengths are compared
_BATCH_ROWS = 16384
_NAMES = (
    "row_id", "finish_reason", "reasoning_state", "prompt_tokens", "cached_tokens",
    "reasoning_tokens", "content_tokens", "error",
)  # fmt: skip
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d,._]*")


class Lengths:
    """How many rows have how many tokens."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)  # by number of tokens
        self.total = 0
        self.longest = 0

    def add(self, column: pa.ChunkedArray) -> None:
        """Takes one value a row."""
        values = column.to_numpy().astype(np.int64)
        if not len(values):
            return
        self.total += int(values.sum())
        self.longest = max(self.longest, int(values.max()))
        found = np.bincount(np.clip(values, 0, _MOST_TOKENS))
        if len(found) < len(self.counts):
            found, self.counts = self.counts, found
        found[: len(self.counts)] += self.counts
        self.counts = found

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float | None:
        """None of no rows."""
        return self.total / self.rows if self.rows else None

    def quantile(self, share: float) -> int | None:
        """The least length that at least this share of the rows does not exceed."""
        if not self.rows:
            return None
        return int(np.searchsorted(np.cumsum(self.counts), share * self.rows))


@dataclass(slots=True)
class ErrorKind:
    """Rows whose errors differ in numbers and quoted words only."""

    rows: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)  # (row id, its error cut short)


@dataclass(slots=True, kw_only=True)
class FinishedRows:
    """Sums over finished rows. `tally` has all of them; lengths leave out rows with an error, and
    `reasoning` those without any."""

    tally: Tally = field(default_factory=Tally)
    prompt: Lengths = field(default_factory=Lengths)
    reasoning: Lengths = field(default_factory=Lengths)
    content: Lengths = field(default_factory=Lengths)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    reasoning_states: Counter[str] = field(default_factory=Counter)
    errors: dict[str, ErrorKind] = field(default_factory=dict)
    other_errors: int = 0  # rows with errors of more kinds than are told apart
    parts: int = 0
    lost_parts: list[str] = field(default_factory=list)  # files that cannot be read

    def add(self, table: pa.Table) -> None:
        """Takes rows with the columns of `_NAMES`."""
        self.tally.add(tally_of(table))
        _add_values(self.finish_reasons, table.column("finish_reason"))
        good = table.filter(pc.is_null(table.column("error")))
        _add_values(self.reasoning_states, good.column("reasoning_state"))
        self.prompt.add(good.column("prompt_tokens"))
        self.content.add(good.column("content_tokens"))
        has_reasoning = pc.not_equal(good.column("reasoning_state"), "none")
        self.reasoning.add(good.column("reasoning_tokens").filter(has_reasoning))
        if good.num_rows < table.num_rows:
            bad = table.filter(pc.is_valid(table.column("error")))
            ids, errors = (bad.column(name).to_pylist() for name in ("row_id", "error"))
            for row_id, error in zip(ids, errors, strict=True):
                self._add_error(row_id, error)

    def _add_error(self, row_id: str, error: str) -> None:
        key = _VARYING.sub("…", error[: 4 * ERROR_CHARS])[:ERROR_CHARS]
        kind = self.errors.get(key)
        if kind is None:
            if len(self.errors) >= _MOST_KINDS:
                self.other_errors += 1
                return
            kind = self.errors[key] = ErrorKind()
        kind.rows += 1
        if len(kind.examples) < EXAMPLES:
            kind.examples.append((_cut(row_id), _cut(error)))


def _cut(text: str) -> str:
    return text if len(text) <= ERROR_CHARS else text[:ERROR_CHARS] + "…"


def _add_values(counter: Counter[str], column: pa.ChunkedArray) -> None:
    for each in pc.value_counts(column).to_pylist():
        counter[str(each["values"])] += each["counts"]


def count_finished(output: Path, manifest: Manifest) -> FinishedRows:
    """Reads every published part, and the segments of rows that no part holds."""
    counts, done = FinishedRows(), DoneRows()
    store = store_at(output)
    for part in Ledger(store).present():
        done.mark_range(part.start, part.stop)
        counts.parts += 1
        try:
            for table in _part_tables(output / part.name, part, manifest):
                counts.add(table)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            counts.lost_parts.append(part.name)
    for segment in list_segments(store.own / "segments"):
        try:
            schema = pq.read_schema(whole_source(segment.path)).remove_metadata()
            table = read_segment(segment, schema, manifest.job_id)
        except (BadSegment, JobError, OSError, pa.ArrowException):
            continue  # the run says so, and does its rows again; it may also have gone meanwhile
        is_new = done.mark(table.column("index").to_numpy())
        counts.add(table.select(_NAMES).filter(pa.array(is_new)))
    return counts


def _part_tables(path: Path, part: Part, manifest: Manifest) -> Iterator[pa.Table]:
    """The counted columns of a part, unprefixed, some rows at a time."""
    prefix = str(setting(manifest, "output.prefix") or "")
    if part.ending == "jsonl":
        yield from _line_tables(path, prefix, manifest)
        return
    with pq.ParquetFile(parquet_source(path), pre_buffer=False) as file:
        columns = [prefix + name for name in _NAMES]
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
            table = pa.Table.from_batches([batch]).select(columns)
            yield table.rename_columns(list(_NAMES))


def _line_tables(path: Path, prefix: str, manifest: Manifest) -> Iterator[pa.Table]:
    schema = own_schema(token_ids=False)
    own = pa.schema([schema.field(name) for name in _NAMES])
    form: LineForm = PlainLines(own, prefix)
    if setting(manifest, "output.format") == "openai_batch":
        form = BatchLines(
            job_id=manifest.job_id, created_s=0, model="", url=None, has_token_ids=False
        )
    for _, table in JsonlParts(own, form).read(path):
        yield table


def setting(manifest: Manifest, name: str) -> object:
    """The value of a dotted field of the job, None when it has none."""
    return manifest.job.get(name, {}).get("value")


def histogram(lengths: Lengths, most_bars: int = 48) -> tuple[Sequence[int], Sequence[int], bool]:
    """(edges, rows in each bar, whether bars widen): bars are as wide as their neighbours, or where
    few rows are far longer than most, each wider than the one before."""
    top = len(lengths.counts)
    median = lengths.quantile(0.5) or 0
    widens = top > 100 and top > 12 * max(median, 1)
    if widens:
        edges = np.unique(np.geomspace(1, top, most_bars + 1).round().astype(np.int64))
        edges = np.concatenate([[0], edges])
    else:
        width = max(1, -(-top // most_bars))
        edges = np.arange(0, top + width, width)
    upto = np.concatenate([[0], np.cumsum(lengths.counts)])
    rows = np.diff(upto[np.minimum(edges, top)])
    return edges.tolist(), rows.tolist(), bool(widens)
