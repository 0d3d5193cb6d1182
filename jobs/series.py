"""`_batchmla/series.jsonl`: how the runs of a job went, one line every few seconds.

A job of any length keeps at most `MAX_LINES` of them: when they are reached every second line goes,
and lines come half as often from then on. A line that was cut off by a crash counts for nothing.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from batchmla.errors import BatchmlaError
from batchmla.jobs.store import Store

MAX_LINES = 5000
EVERY_S = 5.0

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCounts:
    """One look at a run. Tokens, steps and preemptions are sums since this run began; rows done and
    failed are those of the whole output."""

    done: int
    failed: int
    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    total_pages: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0  # rows of forward passes
    steps: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(RunCounts):
    """What the series keeps of it."""

    run_s: float  # when the run began, since the epoch: tells the runs of a job apart
    elapsed_s: float  # since then


def series_path(output: Path) -> Path:
    return output / "_batchmla" / "series.jsonl"


def read_series(output: Path) -> list[Sample]:
    """Every sound line, in the order written; none where there is no file."""
    try:
        lines = series_path(output).read_bytes().split(b"\n")
    except OSError:
        return []
    found = (_sample_of(line) for line in lines if line.strip())
    return [sample for sample in found if sample is not None]


def _sample_of(line: bytes) -> Sample | None:
    """The sample of a line, None when the line is damaged."""
    try:
        raw = json.loads(line)
        known = {each.name: raw[each.name] for each in fields(Sample) if each.name in raw}
        sample = Sample(**known)
    except (ValueError, TypeError, RecursionError):
        return None
    values = asdict(sample).values()
    return sample if all(type(value) in (int, float) for value in values) else None


def _line_of(sample: Sample) -> bytes:
    return json.dumps(asdict(sample), separators=(",", ":")).encode() + b"\n"


class Series:
    """Adds a run's samples to the file. Used by one thread; a failing disk ends it with a warning,
    as what it writes is not needed to go on with the job."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = series_path(store.root)
        self._every_s = EVERY_S
        self._next_s = 0.0
        self._num_lines: int | None = None  # in the file; None before the first line of this run
        self._is_broken = False

    def is_due(self, elapsed_s: float) -> bool:
        """Whether the next sample may be taken."""
        return elapsed_s >= self._next_s and not self._is_broken

    def add(self, sample: Sample) -> None:
        """Writes one line, without waiting for the disk."""
        if self._is_broken:
            return
        self._next_s = sample.elapsed_s + self._every_s
        try:
            line = _line_of(sample)
            if self._num_lines is None:
                self._num_lines = self._count()
                line = b"\n" + line if self._num_lines else line  # the last one may be cut off
            if self._num_lines >= MAX_LINES:
                self._thin_out()
            self._store.append_soft(self._path, line)
            self._num_lines += 1
        except BatchmlaError as error:  # the journal will meet the same disk and say so
            self._is_broken = True
            _LOG.warning("no more samples of this run: %s", error)

    def _count(self) -> int:
        return len(read_series(self._store.root))

    def _thin_out(self) -> None:
        """Drops every second line, and takes samples half as often in this run."""
        kept: Sequence[Sample] = read_series(self._store.root)[::2]
        self._store.write_soft(self._path, b"".join(map(_line_of, kept)))
        self._num_lines = len(kept)
        self._every_s *= 2
