"""One file of the input: its place, its identity, and whether it is still the one it was."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from batchmla.errors import JobError

Format = Literal["parquet", "jsonl", "csv", "openai_batch", "arrow"]
Compression = Literal["none", "gzip", "zstd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file of the input. `num_rows` is None until a footer or a scan has counted them."""

    path: str  # as opened and as shown
    name: str  # below the input root, with "/" between folders: half of a row's identity
    format: Format
    compression: Compression = "none"
    size_bytes: int
    mtime_ns: int
    num_rows: int | None = None


def stat_file(file: InputFile) -> tuple[int, int]:
    """Its size in bytes and its modification time in nanoseconds, now."""
    try:
        status = os.stat(file.path)
    except OSError as fault:
        raise JobError(f"input file {file.path} is gone: {fault.strerror}") from None
    return status.st_size, status.st_mtime_ns


def check_unchanged(file: InputFile) -> None:
    """Refuse a file that is not the one that was opened first."""
    if stat_file(file) != (file.size_bytes, file.mtime_ns):
        raise JobError(f"input file {file.path} changed while the job ran; run the job again")


def read_blocks(file: InputFile, block_bytes: int = 1 << 20) -> Iterator[bytes]:
    """The file's bytes as stored, for a digest."""
    try:
        with open(file.path, "rb") as stream:
            while block := stream.read(block_bytes):
                yield block
    except OSError as fault:
        raise JobError(f"input file {file.path} cannot be read: {fault.strerror}") from None
