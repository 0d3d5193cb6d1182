"""Lines of text files, plain or compressed. Only LF ends a line; bytes stay bytes."""

import gzip
import io
import zlib
from collections.abc import Iterator
from itertools import takewhile
from typing import cast

import pyarrow as pa

from batchmla.errors import JobError
from batchmla.jobs.input_file import InputFile, check_unchanged, open_file

MAX_LINE_BYTES = 256 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 256 << 10


class CutShort(Exception):
    """A compressed stream does not end as it should."""

    def as_error(self, file: InputFile, rows: int) -> JobError:
        """What the user is told; `rows` were read before."""
        return JobError(
            f"input file {file.path} is cut short or damaged after {rows} rows: its "
            f"{file.compression} stream does not end as it should; write or fetch it again"
        )


class _TooLong(Exception):
    """A line is longer than any row may be."""


def read_lines(file: InputFile) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of every line with its end, empty ones too.

    A byte order mark at the start of the file is no part of a line. Raises CutShort.
    """
    check_unchanged(file)
    number = 0
    try:
        with _opened(file) as stream:
            while raw := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise _too_long(file, number)
                if number == 1:
                    raw = raw.removeprefix(_BYTE_ORDER_MARK)
                if raw:
                    yield number, raw
    except _FAULTS as fault:
        raise _unreadable(file, fault) from None


def read_line_blocks(file: InputFile) -> Iterator[tuple[int, list[bytes]]]:
    """(number of the first, from 1; lines without their ends) of about 1 MiB or one longer line.

    A byte order mark at the start of the file and a CR before LF are no part of a line. Raises
    CutShort, after the lines before the damage.
    """
    check_unchanged(file)
    number = 1
    try:
        for data in _whole_lines(file):
            if number == 1:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            lines = data.split(b"\n")
            if not lines[-1]:
                lines.pop()  # what follows the last LF
            if len(data) > MAX_LINE_BYTES:
                short = list(takewhile(lambda line: len(line) < MAX_LINE_BYTES, lines))
                if len(short) < len(lines):
                    yield number, short
                    number += len(short)
                    raise _TooLong
            if b"\r" in data:
                lines = [line.removesuffix(b"\r") for line in lines]
            yield number, lines
            number += len(lines)
    except _TooLong:
        raise _too_long(file, number) from None


def _whole_lines(file: InputFile) -> Iterator[bytes]:
    """The bytes of a file, cut behind line ends."""
    whole: list[bytes] = []
    rest: list[bytes] = []  # of a line whose end has not come
    whole_bytes = rest_bytes = 0
    fault: Exception | None = None
    chunks = _chunks(file)
    while fault is None:
        try:
            chunk = next(chunks, b"")
        except (CutShort, JobError) as caught:
            fault = caught
            break
        if not chunk:
            whole += rest
            break
        end = chunk.rfind(b"\n") + 1
        if end:
            whole += [*rest, chunk[:end]]
            whole_bytes += rest_bytes + end
            rest, rest_bytes = [], 0
        if end < len(chunk):
            rest.append(chunk[end:])
            rest_bytes += len(chunk) - end
        if whole_bytes >= _BLOCK_BYTES or (whole and rest_bytes > MAX_LINE_BYTES):
            yield b"".join(whole)
            whole, whole_bytes = [], 0
        if rest_bytes > MAX_LINE_BYTES:
            raise _TooLong
    if whole:
        yield b"".join(whole)
    if fault is not None:
        raise fault


def _chunks(file: InputFile) -> Iterator[bytes]:
    """The bytes as they come."""
    try:
        with _opened(file) as stream:
            while chunk := stream.read1(_CHUNK_BYTES):
                yield chunk
    except _FAULTS as fault:
        raise _unreadable(file, fault) from None


_FAULTS = (EOFError, gzip.BadGzipFile, zlib.error, OSError)


def _unreadable(file: InputFile, fault: Exception) -> JobError | CutShort:
    if file.compression == "none":
        return JobError(f"input file {file.path} cannot be read: {fault}")
    return CutShort()


def _too_long(file: InputFile, number: int) -> JobError:
    return JobError(f"{file.path}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB")


def _opened(file: InputFile) -> io.BufferedReader:
    if file.compression == "gzip":
        return cast(io.BufferedReader, gzip.open(open_file(file), "rb"))
    if file.compression == "zstd":
        stream = pa.CompressedInputStream(pa.PythonFile(open_file(file), mode="r"), "zstd")
        return io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)
    return cast(io.BufferedReader, open_file(file))
