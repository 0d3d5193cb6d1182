"""Lines of text files, plain or compressed. Only LF ends a line; bytes stay bytes."""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

import pyarrow as pa

from batchmla.errors import JobError
from batchmla.jobs.input_file import InputFile, check_unchanged, open_file

MAX_LINE_BYTES = 256 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class CutShort(Exception):
    """A compressed stream does not end as it should."""

    def as_error(self, file: InputFile, rows: int) -> JobError:
        """What the user is told; `rows` were read before."""
        return JobError(
            f"input file {file.path} is cut short or damaged after {rows} rows: its "
            f"{file.compression} stream does not end as it should; write or fetch it again"
        )


def read_lines(file: InputFile, *, keeps_ends: bool = False) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of every line that is not empty, without its line end.

    A byte order mark at the start of the file and a CR before LF are no part of a line. With
    `keeps_ends` empty lines come too, and line ends stay. Raises CutShort.
    """
    check_unchanged(file)
    number = 0
    try:
        with _opened(file) as stream:
            while raw := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise JobError(
                        f"{file.path}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB"
                    )
                if number == 1:
                    raw = raw.removeprefix(_BYTE_ORDER_MARK)
                if not keeps_ends:
                    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
                if raw:
                    yield number, raw
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as fault:
        if file.compression == "none":
            raise JobError(f"input file {file.path} cannot be read: {fault}") from None
        raise CutShort from None


def _opened(file: InputFile) -> BinaryIO:
    if file.compression == "gzip":
        return cast(BinaryIO, gzip.open(open_file(file), "rb"))
    if file.compression == "zstd":
        stream = pa.CompressedInputStream(pa.PythonFile(open_file(file), mode="r"), "zstd")
        return cast(BinaryIO, io.BufferedReader(stream, 1 << 20))
    return open_file(file)
