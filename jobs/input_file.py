"""One file of the input: its place, its identity, and whether it is still the one it was."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

from batchmla.errors import JobError
from batchmla.jobs.remote import ObjectFacts, RemotePath, open_ranges
from batchmla.jobs.remote_calls import is_url
from batchmla.jobs.remote_input import reading

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
    tag: str | None = None  # of an object in a store: changes with its content
    num_rows: int | None = None


def stat_file(file: InputFile) -> tuple[int, int]:
    """Its size in bytes and its modification time in nanoseconds, now."""
    if is_url(file.path):
        facts = _facts(file)
        return facts.num_bytes, facts.mtime_ns
    try:
        status = os.stat(file.path)
    except OSError as fault:
        raise JobError(f"input file {file.path} is gone: {fault.strerror}") from None
    return status.st_size, status.st_mtime_ns


def check_unchanged(file: InputFile) -> None:
    """Refuse a file that is not the one that was opened first."""
    if is_url(file.path) and file.tag is not None:
        facts = _facts(file)
        is_same = (facts.num_bytes, facts.tag) == (file.size_bytes, file.tag)
    else:
        is_same = stat_file(file) == (file.size_bytes, file.mtime_ns)
    if not is_same:
        raise JobError(f"input file {file.path} changed while the job ran; run the job again")


def _facts(file: InputFile) -> ObjectFacts:
    with reading(file.path):
        facts = RemotePath(file.path).facts()
    if facts is None:
        raise JobError(f"input file {file.path} is gone: no object has that name")
    return facts


def open_file(file: InputFile) -> BinaryIO:
    """Its bytes as stored, from front to back; an object's in ranges as they are asked for."""
    if is_url(file.path):
        return open_ranges(RemotePath(file.path))
    return open(file.path, "rb", buffering=1 << 20)


def read_blocks(file: InputFile, block_bytes: int = 1 << 20) -> Iterator[bytes]:
    """The file's bytes as stored, for a digest."""
    try:
        with open_file(file) as stream:
            while block := stream.read(block_bytes):
                yield block
    except OSError as fault:
        raise JobError(f"input file {file.path} cannot be read: {fault.strerror}") from None
