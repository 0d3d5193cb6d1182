"""Parquet files: the footer first, then row group by row group."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from batchmla.errors import JobError
from batchmla.jobs.input_file import InputFile, check_unchanged
from batchmla.jobs.remote import BLOCK_BYTES, RemotePath, parquet_source, place_of

_BATCH_BYTES = 8 << 20


class ParquetForm:
    """A `ColumnarForm`."""

    def describe(self, file: InputFile) -> tuple[int, pa.Schema]:
        """From the footer."""
        with _open(file) as footer:
            return footer.metadata.num_rows, footer.schema_arrow

    def batches(
        self, file: InputFile, skipped: int, columns: Sequence[str], max_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Row groups within `skipped` are not read; a batch has about 8 MiB at most."""
        check_unchanged(file)
        with _open(file) as parquet:
            present = [name for name in parquet.schema_arrow.names if name in set(columns)]
            try:
                for group in range(parquet.metadata.num_row_groups):
                    num_rows = parquet.metadata.row_group(group).num_rows
                    if skipped >= num_rows:
                        skipped -= num_rows
                        continue
                    batch_rows = _batch_rows(parquet, group, present, max_rows)
                    for batch in parquet.iter_batches(
                        batch_rows, row_groups=[group], columns=present
                    ):
                        if skipped >= batch.num_rows:
                            skipped -= batch.num_rows
                            continue
                        yield batch.slice(skipped)
                        skipped = 0
            except (pa.ArrowException, OSError) as fault:
                raise _damaged(file, fault) from None


def _open(file: InputFile) -> pq.ParquetFile:
    try:
        place = place_of(file.path)
        block_bytes = BLOCK_BYTES if isinstance(place, RemotePath) else 1 << 20
        return pq.ParquetFile(parquet_source(place), buffer_size=block_bytes, memory_map=False)
    except (pa.ArrowException, OSError) as fault:
        raise _damaged(file, fault) from None


def _damaged(file: InputFile, fault: Exception) -> JobError:
    reason = " ".join(str(fault).split())[:200]
    return JobError(f"input file {file.path} cannot be read as Parquet: {reason}; write it again")


def _batch_rows(parquet: pq.ParquetFile, group: int, columns: list[str], max_rows: int) -> int:
    """How many rows of a row group hold about 8 MiB of the columns."""
    about = parquet.metadata.row_group(group)
    names = set(columns)
    num_bytes: int = sum(
        about.column(position).total_uncompressed_size
        for position in range(about.num_columns)
        if about.column(position).path_in_schema.split(".")[0] in names
    )
    num_rows: int = about.num_rows
    return max(1, min(max_rows, _BATCH_BYTES * num_rows // max(num_bytes, 1)))
