"""The input of a job as one table: files in order, rows by index, carried columns for the writer.

It reads local files in constant memory; per row it keeps a hash of the id.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from batchmla.errors import JobError
from batchmla.jobs import identity
from batchmla.jobs.arrow_form import ArrowForm
from batchmla.jobs.columnar_source import ColumnarForm, ColumnarSource
from batchmla.jobs.csv_form import CsvForm
from batchmla.jobs.files import find_files
from batchmla.jobs.ids import IdIndex
from batchmla.jobs.input_file import InputFile
from batchmla.jobs.jsonl import JsonlForm
from batchmla.jobs.openai_form import BatchForm, is_batch
from batchmla.jobs.parquet_form import ParquetForm
from batchmla.jobs.row import Row
from batchmla.jobs.settings import InputSettings, JobSpec
from batchmla.jobs.source import Faults, RowBatch, Scan, Source
from batchmla.jobs.text_form import TextForm
from batchmla.jobs.text_source import TextSource
from batchmla.jobs.wording import nearest

logger = logging.getLogger(__name__)

_FORMS: Mapping[str, Callable[[], TextForm]] = {
    "jsonl": JsonlForm,
    "csv": CsvForm,
    "openai_batch": BatchForm,
}

__all__ = ["InputFile", "InputTable", "PreScan", "open_input", "open_job_input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreScan:
    """What is known before weights load. `num_rows` is None while some rows were not reached."""

    num_rows: int | None
    scanned_rows: int
    malformed_rows: int  # that will become error rows


def open_job_input(spec: JobSpec) -> "InputTable":
    """The input of a job."""
    ending = "parquet" if spec.output.format == "parquet" else "jsonl"
    return open_input(
        spec.input,
        malformed=spec.errors.malformed,
        output=spec.output.path,
        part=f"part-00000.{ending}",
        has_prompt=spec.prompt.is_given,
    )


def open_input(
    settings: InputSettings,
    *,
    malformed: Literal["fail", "row"] = "fail",
    output: str | None = None,
    part: str = "part-00000.parquet",
    has_prompt: bool = True,
) -> "InputTable":
    """Find the files and read their footers; `malformed` is `errors.malformed` of the job.

    An `output` folder that the job would read is refused; its files have names such as `part`. The
    input of a job without a prompt must be an OpenAI batch.
    """
    files = find_files(settings, output, part)
    if not has_prompt and settings.format == "auto":
        files = _as_batch(files)
    source: Source
    if files[0].format in ("parquet", "arrow"):
        columnar: ColumnarForm = ArrowForm()
        if files[0].format == "parquet":
            columnar = ParquetForm()
        source = ColumnarSource(files, settings.id, columnar)
    else:
        source = TextSource(files, settings.id, _FORMS[files[0].format]())
    return InputTable(source, settings, malformed)


def _as_batch(files: tuple[InputFile, ...]) -> tuple[InputFile, ...]:
    """The files as the OpenAI batch that they have to be where the job has no prompt."""
    for file in files:
        if file.format != "jsonl" or (file.size_bytes and not is_batch(file)):
            raise JobError(
                f"give exactly one of prompt.user, prompt.messages and prompt.raw; found none, and "
                f"{file.path} is no OpenAI batch file, whose requests hold the prompts"
            )
    return tuple(replace(file, format="openai_batch") for file in files)


class InputTable:
    """Rows of all files in order. Iterators may be started repeatedly, in one thread at a time."""

    def __init__(
        self, source: Source, settings: InputSettings, malformed: Literal["fail", "row"]
    ) -> None:
        self._source = source
        self._settings = settings
        self._malformed = malformed
        self._ids = IdIndex()
        self._num_checked = 0  # rows whose ids are in the index
        self._is_complete = isinstance(source, ColumnarSource)
        self._scanned: PreScan | None = None
        self._scan_mode: str | None = None
        self._has_columns = self._is_complete
        self._carried: pa.Schema | None = None
        self._wanted: tuple[str, ...] | None = None
        self._digests: identity.Digests = {}
        if self._has_columns:
            self._carried = self._choose_carried()

    @property
    def files(self) -> tuple[InputFile, ...]:
        """The files in reading order; a row's `file` is a position in it."""
        return self._source.files

    @property
    def id_column(self) -> str | None:
        """The column that names rows; None: rows are named "<file>:<row number>"."""
        return self._source.id_column

    @property
    def num_rows(self) -> int | None:
        """Rows of all files, None while a file is uncounted."""
        counts = [file.num_rows for file in self.files]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that prompts may use; JSONL is scanned for them if it was not before."""
        if not self._has_columns:
            self.scan()
        return tuple(self._source.schema.names)

    @property
    def carried(self) -> pa.Schema:
        """Schema of the columns that go to the output; JSONL is scanned for it likewise."""
        if self._carried is None:
            self.scan()
        assert self._carried is not None, "a scan settles the columns"
        return self._carried

    def select(self, columns: Iterable[str]) -> None:
        """From here on rows have the values of these columns only: what the prompts use."""
        self._wanted = tuple(dict.fromkeys(columns))

    def require(self, columns: Iterable[str], field: str) -> None:
        """Refuse columns that the input lacks; `field` is the key of the job file that asks."""
        if not self.columns:
            return  # JSONL without a readable row
        for name in columns:
            if name in self.columns:
                continue
            near = nearest(name, self.columns)
            if name == "reasoning_content" and "reasoning" in self.columns:
                near = "reasoning"
            hint = f"did you mean {near}?" if near else f"it has {', '.join(self.columns)}"
            raise JobError(f"{field}: the input has no column {name}; {hint}")

    def _choose_carried(self) -> pa.Schema:
        schema = self._source.schema
        if self.id_column is not None:
            self.require([self.id_column], "input.id")
        if self._settings.columns is None:
            return schema
        self.require(self._settings.columns, "input.columns")
        names = list(dict.fromkeys(self._settings.columns))
        if self.id_column is not None and self.id_column not in names:
            names.insert(0, self.id_column)
        fields = [schema.field(name) for name in names if name in schema.names]
        return pa.schema(fields, metadata=schema.metadata)

    def scan(self, mode: Literal["auto", "full"] | None = None, limit_s: float = 30.0) -> PreScan:
        """Look at the input before weights load; every fault found is in one JobError.

        Of Parquet the id column is read; of JSONL what `limit_s` seconds allow, or with "full"
        (default: `input.check`) all of it. A second call costs nothing.
        """
        mode = mode or self._settings.check
        if self._scanned is not None and self._scan_mode in (mode, "full"):
            return self._scanned
        self._ids = IdIndex()
        began_s = time.monotonic()
        scan = self._source.scan(self._ids, limit_s=None if mode == "full" else limit_s)
        if (took_s := time.monotonic() - began_s) > 5.0:
            logger.info("looked at %d rows of the input in %.0f s", scan.num_rows, took_s)
        self._num_checked = scan.num_rows
        self._has_columns = True
        self._carried = self._choose_carried()
        self._refuse(scan)
        self._scan_mode = mode
        self._scanned = PreScan(
            num_rows=self.num_rows if scan.is_complete else None,
            scanned_rows=scan.num_rows,
            malformed_rows=scan.faults.count,
        )
        return self._scanned

    def _refuse(self, scan: Scan) -> None:
        """Raise what a look at some rows found, if it found anything."""
        problems: list[str] = []
        if scan.faults.count and self._malformed == "fail":
            problems.append(scan.faults.text("malformed row"))
            problems.append("errors.malformed: row makes malformed rows error rows")
        if scan.num_repeats:
            problems.append(self._repeats_text(scan))
        if problems:
            raise JobError("\n".join(problems))

    def _repeats_text(self, scan: Scan) -> str:
        """Each repeated id with its first and its later place; costs a second look at the ids."""
        missing = {typed_id for typed_id, _ in scan.repeats}
        first: dict[str | int, str] = {}
        for typed_id, place in self._source.places():
            if typed_id in missing:
                first[typed_id] = place
                missing.discard(typed_id)
                if not missing:
                    break
        faults = Faults(scan.num_repeats)
        for typed_id, place in scan.repeats:
            faults.listed.append(
                f"{place}: the id {typed_id!r} was already used at {first[typed_id]}"
            )
        way_out = "make the ids unique, or name another column or row_number in input.id"
        return f"{faults.text('repeated id')}\n{way_out}"

    def rows(
        self,
        start: int = 0,
        limit: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[list[Row]]:
        """Rows from index `start` on, at most `limit`; `columns` overrides what `select` chose.

        What the scan has not reached is checked here: a malformed row or a repeated id raises
        JobError, or with errors.malformed: row gives a row with `error` set.
        """
        columns = columns if columns is not None else self._wanted
        end = None if limit is None else start + limit
        if limit == 0:
            return
        for batch in self._source.rows(min(start, self._num_checked), columns):
            self._check(batch, end)
            rows = batch.rows
            if rows and rows[0].index < start:
                rows = [row for row in rows if row.index >= start]
            if end is not None and rows and rows[-1].index >= end:
                rows = [row for row in rows if row.index < end]
                if rows:
                    yield rows
                return
            if rows:
                yield rows
            if end is not None and batch.rows[-1].index + 1 >= end:
                return

    def _check(self, batch: RowBatch, end: int | None) -> None:
        scan = Scan()
        for index, sentence in batch.faults if self._malformed == "fail" else ():
            if end is None or index < end:
                scan.faults.add(sentence)
        if self.id_column is not None:
            self._check_ids(batch, end, scan)
        self._refuse(scan)

    def _check_ids(self, batch: RowBatch, end: int | None, scan: Scan) -> None:
        if not batch.rows or batch.rows[-1].index < self._num_checked:
            return
        malformed = {index for index, _ in batch.faults}
        fresh = [
            row
            for row in batch.rows
            if row.index >= self._num_checked
            and row.index not in malformed
            and (end is None or row.index < end)
        ]
        if not fresh:
            return
        self._num_checked = fresh[-1].index + 1
        scan.add_ids(
            self._ids,
            [row.typed_id for row in fresh],
            lambda position: self._place(batch, fresh[position]),
        )

    def _place(self, batch: RowBatch, row: Row) -> str:
        if batch.lines is not None:
            line = batch.lines[row.index - batch.rows[0].index]
            return f"{self.files[row.file].path}:{line}"
        return f"{self.files[row.file].path}, row {row.number} (counted from 0)"

    def carried_batches(self, start: int = 0) -> Iterator[pa.RecordBatch]:
        """The carried columns from row `start` on, under exactly the schema `carried`.

        A second, sequential read: a file that is no longer the one opened first is refused.
        """
        for batch, faults in self._source.carried(self.carried, start):
            if faults.count and self._malformed == "fail":
                raise JobError(faults.text("malformed row"))
            yield batch

    def fingerprint(self) -> dict[str, str]:
        """Place, size and content digest by file name: equal if and only if the input is.

        The first call reads every byte, at about 1 GB/s a core; a later one only the files whose
        size or time has changed.
        """
        return identity.fingerprint(self.files, self._digests)

    def last_rows(self) -> str | None:
        """The rows of the last file in words, where a later `has_grown` needs them."""
        file = self.files[-1]
        if isinstance(self._source, TextSource) or file.size_bytes > identity.MOST_BYTES:
            return None
        assert file.num_rows is not None, "columnar files are counted when they are opened"
        return identity.describe_rows(self._rows_of(len(self.files) - 1), file.num_rows)

    def has_grown(self, name: str, was: str, was_rows: str | None) -> bool:
        """Whether file `name` is what a fingerprint called `was`, with rows added at its end.

        `was_rows`: what `last_rows` said when that file was the last one.
        """
        number = next((i for i, file in enumerate(self.files) if file.name == name), None)
        if number is None or was.partition(",")[0] != f"file {number + 1}":
            return False
        file = self.files[number]
        if isinstance(self._source, TextSource):
            return identity.has_grown_text(file, was)
        if was_rows is None or file.num_rows is None:
            return False
        return identity.has_grown_rows(was_rows, self._rows_of(number), file.num_rows)

    def _rows_of(self, number: int) -> Iterator[pa.RecordBatch]:
        """All columns from the first row of one columnar file on."""
        start = sum(file.num_rows or 0 for file in self.files[:number])
        for batch, _ in self._source.carried(self._source.schema, start):
            yield batch
