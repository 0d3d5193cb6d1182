"""What the pipeline needs from its neighbours, each replaceable: input, text, engine, disk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa

from batchmla.core import Engine
from batchmla.jobs.journal import Pace
from batchmla.jobs.row import Row
from batchmla.jobs.rowtext import RowText
from batchmla.jobs.spec import JobSpec
from batchmla.jobs.store import Store


class ScanResult(Protocol):
    """What the pre-scan found. `num_rows` is None when it has not seen the end of the input."""

    @property
    def num_rows(self) -> int | None: ...


class Table(Protocol):
    """The input. It can be read twice: once for prompts, once for the carried columns."""

    @property
    def carried(self) -> pa.Schema:
        """Known after `scan`."""
        ...

    def scan(self, mode: Literal["auto", "full"]) -> ScanResult:
        """The look before weights load; raises for what is wrong."""
        ...

    def rows(
        self, start: int, limit: int | None, columns: Sequence[str] | None = None
    ) -> Iterator[list[Row]]:
        """Rows in order from index `start`, at most `limit`, with the values of `columns`."""
        ...

    def carried_batches(self, start: int) -> Iterator[pa.RecordBatch]:
        """The carried columns from row `start` on."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """File name → its place among the files, size and digest, as text."""
        ...

    def last_rows(self) -> str | None:
        """The rows of the last file in words, as far as `has_grown` needs them."""
        ...

    def has_grown(self, name: str, was: str, was_rows: str | None) -> bool:
        """Whether file `name` is what an earlier fingerprint and `last_rows` said of it, with rows
        added at its end."""
        ...


def _nothing_learned(_engine_s: float) -> Mapping[str, Any]:
    """Of an engine that computes nothing."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine and what its `auto` settings became, for the summary; `learned` tells, once it has
    run for so many seconds, what its steps took."""

    engine: Engine
    effective: Mapping[str, Any]
    learned: Callable[[float], Mapping[str, Any]] = _nothing_learned


def _no_numerics(_spec: JobSpec) -> Mapping[str, str]:
    """Of an engine that computes nothing."""
    return {}


def _nothing_open() -> None:
    """Nothing to close."""


def _no_check(_spec: JobSpec) -> None:
    """Of an engine that reads no files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """How a run gets its neighbours, in the order of use. `numerics` says what the bits of a row
    depend on besides the row; `check` raises for what `engine` would refuse, without loading."""

    store: Callable[[Path], Store]
    table: Callable[[JobSpec], Table]
    text: Callable[[JobSpec, Table], RowText]
    engine: Callable[[JobSpec], LoadedEngine]
    pace: Pace = field(default_factory=Pace)  # of the journal
    numerics: Callable[[JobSpec], Mapping[str, str]] = _no_numerics
    check: Callable[[JobSpec], None] = _no_check
    close: Callable[[], None] = _nothing_open  # at the end of the run


def seams_of(spec: JobSpec) -> Seams:
    """Those that a job's executor needs. Imported late: they bring torch."""
    if spec.executor.kind == "ray":
        from batchmla.jobs.replicas_seams import ray_seams

        return ray_seams(spec)
    from batchmla.jobs.local import local_seams

    return local_seams()
