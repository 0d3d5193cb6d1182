"""Lines of JSONL files, plain or compressed, one object each; and what is wrong with a line.

Only LF ends a line (a CR before it is dropped). A byte order mark at the start of a file and blank
lines are skipped. A line that is no object, holds a key twice or is not UTF-8 is malformed.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa

from batchmla.errors import JobError
from batchmla.jobs.files import InputFile, check_unchanged

_MAX_LINE_BYTES = 256 << 20
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class MalformedLine(ValueError):
    """A line that is no row; the message is the second half of a sentence."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank: `row` counts those from 0, `number` counts all lines from 1."""

    row: int
    number: int
    raw: bytes


def read_lines(file: InputFile) -> Iterator[Line]:
    """The lines of a file that hold something."""
    check_unchanged(file)
    row = 0
    number = 0
    try:
        with _opened(file) as stream:
            while raw := stream.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > _MAX_LINE_BYTES:
                    raise JobError(
                        f"{file.path}:{number}: the line is longer than {_MAX_LINE_BYTES >> 20} MiB"
                    )
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                raw = raw.removesuffix(b"\n").removesuffix(b"\r")
                if raw and not raw.isspace():
                    yield Line(row, number, raw)
                    row += 1
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as fault:
        if file.compression == "none":
            raise JobError(f"input file {file.path} cannot be read: {fault}") from None
        raise JobError(
            f"input file {file.path} is cut short or damaged after {row} rows: its "
            f"{file.compression} stream does not end as it should; write or fetch it again"
        ) from None


def _opened(file: InputFile) -> BinaryIO:
    if file.compression == "gzip":
        return cast(BinaryIO, gzip.open(file.path, "rb"))
    if file.compression == "zstd":
        stream = pa.CompressedInputStream(pa.OSFile(file.path), "zstd")
        return cast(BinaryIO, io.BufferedReader(stream, 1 << 20))
    return open(file.path, "rb", buffering=1 << 20)


def parse_line(raw: bytes) -> dict[str, Any]:
    """The object of a line. NaN and Infinity, which pandas writes, are read as numbers."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        byte = raw[fault.start]
        raise MalformedLine(f"byte 0x{byte:02x} at position {fault.start} is not UTF-8") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as fault:
        raise MalformedLine(f"not valid JSON: {fault.msg} at character {fault.colno}") from None
    except RecursionError:
        raise MalformedLine("not usable JSON: nested too deeply") from None
    except MalformedLine:
        raise
    except ValueError:  # beyond Python's digit limit
        raise MalformedLine("not usable JSON: a number has thousands of digits") from None
    if not isinstance(value, dict):
        kind = {list: "a list", str: "text", bool: "a boolean", type(None): "null"}
        raise MalformedLine(f"{kind.get(type(value), 'a number')}, not an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise MalformedLine(f"the key {json.dumps(twice)} is given twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def replace_surrogates(raw: bytes, values: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """`values` with U+FFFD for every lone surrogate, and a sentence if there was one."""
    if not _SURROGATE_ESCAPE.search(raw):
        return values, None
    clean: dict[str, Any] = {}
    found: str | None = None
    for key, value in values.items():
        clean[_valid(key)] = cleaned = _valid(value)
        if found is None and not (_same(cleaned, value) and _valid(key) == key):
            found = f"column {json.dumps(key)} holds a lone surrogate, which is no character"
    return clean, found


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a) == json.dumps(b)


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_valid(one) for one in value]
    if isinstance(value, dict):
        return {_valid(key): _valid(one) for key, one in value.items()}
    return value
