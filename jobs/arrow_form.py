"""Arrow streams on disk: the shards of a saved data set. Mapped into memory, not read whole."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from batchmla.errors import JobError
from batchmla.jobs.input_file import InputFile, check_unchanged

_BATCH_BYTES = 8 << 20


class ArrowForm:
    """A `ColumnarForm`."""

    def describe(self, file: InputFile) -> tuple[int, pa.Schema]:
        """Counts rows batch by batch: an Arrow stream has no footer."""
        try:
            with pa.memory_map(file.path) as mapped, pa.ipc.open_stream(mapped) as stream:
                return sum(batch.num_rows for batch in stream), stream.schema
        except (pa.ArrowException, OSError) as fault:
            raise _damaged(file, fault) from None

    def batches(
        self, file: InputFile, skipped: int, columns: Sequence[str], max_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Slices of the file's batches, of about 8 MiB at most."""
        check_unchanged(file)
        try:
            with pa.memory_map(file.path) as mapped, pa.ipc.open_stream(mapped) as stream:
                present = [name for name in stream.schema.names if name in set(columns)]
                for batch in stream:
                    if skipped >= batch.num_rows:
                        skipped -= batch.num_rows
                        continue
                    yield from _slices(batch.slice(skipped).select(present), max_rows)
                    skipped = 0
        except (pa.ArrowException, OSError) as fault:
            raise _damaged(file, fault) from None


def _slices(batch: pa.RecordBatch, max_rows: int) -> Iterator[pa.RecordBatch]:
    row_bytes = batch.nbytes // max(batch.num_rows, 1)
    step = max(1, min(max_rows, _BATCH_BYTES // max(row_bytes, 1)))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _damaged(file: InputFile, fault: Exception) -> JobError:
    reason = " ".join(str(fault).split())[:200]
    return JobError(f"input file {file.path} cannot be read as Arrow: {reason}; save it again")
