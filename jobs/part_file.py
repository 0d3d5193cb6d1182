"""How the parts of an output lie on the disk: Parquet, or one JSON object a line."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchmla.jobs.json_values import json_lines
from batchmla.jobs.remote import parquet_source

_BATCH_ROWS = 2048

Groups = Iterable[tuple[pa.Table, pa.Table]]  # (carried columns, ours) of consecutive rows


class PartFile(Protocol):
    """Writes and reads the files of one output. Our columns have no prefix here."""

    def write(self, path: Path, groups: Groups) -> None:
        """One part as a whole."""
        ...

    def read(self, path: Path) -> Iterator[tuple[pa.Table | None, pa.Table]]:
        """(carried, ours) in batches; carried is None where the file does not keep its types."""
        ...

    def own(self, path: Path, names: Sequence[str]) -> pa.Table:
        """Some of our columns, of all rows."""
        ...


class ParquetParts:
    """Both kinds of columns under one schema."""

    def __init__(self, schema: pa.Schema, own: pa.Schema, prefix: str, compression: str) -> None:
        self._schema = schema
        self._own = own
        self._prefix = prefix
        self._compression = compression

    def write(self, path: Path, groups: Groups) -> None:
        """A row group for each group."""
        with pq.ParquetWriter(path, self._schema, compression=self._compression) as file:
            for carried, own in groups:
                columns = [*carried.columns, *(own.column(name) for name in self._own.names)]
                file.write_table(pa.Table.from_arrays(columns, schema=self._schema))

    def read(self, path: Path) -> Iterator[tuple[pa.Table | None, pa.Table]]:
        """Both, as they are in the file."""
        carried = self._schema.names[: len(self._schema) - len(self._own)]
        file = pq.ParquetFile(parquet_source(path), pre_buffer=False)
        for batch in file.iter_batches(_BATCH_ROWS):
            table = pa.Table.from_batches([batch])
            ours = table.select([self._prefix + name for name in self._own.names])
            yield table.select(carried), ours.rename_columns(self._own.names).cast(self._own)

    def own(self, path: Path, names: Sequence[str]) -> pa.Table:
        """Read column by column."""
        columns = [self._prefix + name for name in names]
        table = pq.read_table(parquet_source(path), columns=columns, partitioning=None)
        return table.rename_columns(list(names))


class LineForm(Protocol):
    """What a row is as a JSON object, and back."""

    def lines(self, carried: pa.Table, own: pa.Table) -> bytes:
        """The lines of all rows; own columns are those of the output, in their order."""
        ...

    def own(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Our columns of a line's object."""
        ...


class PlainLines:
    """Carried columns, then ours, by name; every one, null or not."""

    def __init__(self, own: pa.Schema, prefix: str) -> None:
        self._names = {name: prefix + name for name in own.names}

    def lines(self, carried: pa.Table, own: pa.Table) -> bytes:
        """Column by column."""
        columns = dict(zip(carried.column_names, carried.columns, strict=True))
        columns |= {self._names[name]: own.column(name) for name in own.column_names}
        return json_lines(columns, own.num_rows)

    def own(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Ours by their unprefixed names."""
        return {name: line[shown] for name, shown in self._names.items()}


class JsonlParts:
    """Rows as lines. Their carried columns have lost their types."""

    def __init__(self, own: pa.Schema, form: LineForm) -> None:
        self._own = own
        self._form = form

    def write(self, path: Path, groups: Groups) -> None:
        """A line a row."""
        with path.open("wb", buffering=1 << 20) as file:
            for carried, own in groups:
                own = own.select(self._own.names)
                for start in range(0, own.num_rows, _BATCH_ROWS):
                    part = carried.slice(start, _BATCH_ROWS), own.slice(start, _BATCH_ROWS)
                    file.write(self._form.lines(*part))

    def read(self, path: Path) -> Iterator[tuple[pa.Table | None, pa.Table]]:
        """Ours only."""
        with path.open("rb", buffering=1 << 20) as file:
            while lines := list(islice(file, _BATCH_ROWS)):
                rows = [self._form.own(json.loads(line)) for line in lines]
                yield None, pa.Table.from_pylist(rows, schema=self._own)

    def own(self, path: Path, names: Sequence[str]) -> pa.Table:
        """Read row by row."""
        tables = [table.select(names) for _, table in self.read(path)]
        return pa.concat_tables([self._own.empty_table().select(names), *tables])
