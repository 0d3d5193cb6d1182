"""The header of one safetensors file: its tensors, and every way in which the file is not what
its header says. No data is read.

The file: 8 bytes with the header's length, the header (a JSON object), the tensors' bytes without
a gap between them or behind the last.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from batchmla.weights.faults import AGAIN, PULL, Fault
from batchmla.weights.folder import LFS_POINTER

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class Entry(NamedTuple):
    """One tensor, as the header of its file has it; `start` is the file's byte it begins at."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that dtype and shape ask for."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """What one file holds. `entries` None: nothing can be told of it."""

    entries: dict[str, Entry] | None
    faults: list[Fault]


class _Unreadable(Exception):
    """Why nothing of the file can be used."""

    def __init__(self, text: str, way_out: str = AGAIN) -> None:
        super().__init__(text)
        self.fault = Fault("damaged", text, way_out)


class _Twice(ValueError):
    """A JSON object has a key twice."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first bytes of a file: its header, not parsed, or why there is none."""

    path: Path
    raw: bytes
    file_bytes: int
    fault: Fault | None = None


def read_start(path: Path) -> Start:
    """Reads the header's bytes and nothing else."""
    try:
        return Start(path, *_read_start(path))
    except _Unreadable as error:
        return Start(path, b"", 0, error.fault)


def parse_header(start: Start) -> Header:
    """Every fault of one file is in it."""
    if start.fault is not None:
        return Header(None, [start.fault])
    path, data_start = start.path, LENGTH_BYTES + len(start.raw)
    try:
        header = _parse(path, start.raw)
        places = {name: _read_place(path, name, info) for name, info in header.items()}
    except _Unreadable as error:
        return Header(None, [error.fault])
    entries = {
        name: Entry(path, dtype, shape, data_start + begin)
        for name, (dtype, shape, begin, _) in places.items()
    }
    texts = [*_wrong_sizes(path, entries, places), *_gaps(path, places)]
    end = data_start + max((place[3] for place in places.values()), default=0)
    if start.file_bytes < end:
        texts.append(f"{path.name} is cut off: {start.file_bytes} bytes of {end}")
    elif start.file_bytes > end:
        texts.append(
            f"{path.name} has {start.file_bytes - end} bytes behind its last tensor: "
            f"{start.file_bytes}, not {end}"
        )
    return Header(entries, [Fault("damaged", text, AGAIN) for text in texts])


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    """The tensors of a header by name."""
    try:
        header = json.loads(raw, object_pairs_hook=_without_repeats)
    except _Twice as error:
        raise _Unreadable(f'{path.name} has a broken header: "{error}" is there twice') from error
    except (ValueError, RecursionError):
        header = None
    if raw[:1] != b"{" or not isinstance(header, dict):
        raise _Unreadable(f"{path.name} has a broken header: it is no JSON object")
    header.pop("__metadata__", None)
    return header


def _read_start(path: Path) -> tuple[bytes, int]:
    """The header's bytes, and how many the file has."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            if len(start) == LENGTH_BYTES and LFS_POINTER.startswith(start):
                raise _Unreadable(
                    f"{path.name} is a git-LFS pointer, not the weights themselves", PULL
                )
            header_bytes = int.from_bytes(start, "little")
            if file_bytes < LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES:
                told = "it is empty" if not file_bytes else f"it begins with {start!r}"
                raise _Unreadable(f"{path.name} is not a safetensors file: {told}")
            raw = file.read(header_bytes)
    except OSError as error:
        raise _Unreadable(f"{path.name} cannot be read ({error.strerror})") from error
    if len(raw) < header_bytes:
        raise _Unreadable(
            f"{path.name} ends inside its header: {file_bytes} bytes of at least "
            f"{LENGTH_BYTES + header_bytes}"
        )
    return raw, file_bytes


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _Twice(next(name for name, count in counts.items() if count > 1))
    return found


_Place = tuple[str, tuple[int, ...], int, int]  # dtype, shape, first byte and end in the data


def _read_place(path: Path, name: str, info: Any) -> _Place:
    if isinstance(info, dict):
        dtype, shape, place = info.get("dtype"), info.get("shape"), info.get("data_offsets")
        if _are_counts(shape) and _are_counts(place) and len(place) == 2:
            if isinstance(dtype, str) and dtype in DTYPE_BYTES:
                return dtype, tuple(shape), place[0], place[1]
            if isinstance(dtype, str):
                known = ", ".join(DTYPE_BYTES)
                raise _Unreadable(
                    f"{path.name}: {name} has the dtype {dtype[:40]}, which is none of {known}",
                    "take a copy of the model in one of those",
                )
    raise _Unreadable(f"{path.name} has a broken header: {name} has no dtype, shape and place")


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of whole numbers from 0 on; true and false are none."""
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110 a generator takes three times as long, for each tensor
        if type(value) is not int or value < 0:
            return False
    return True


def _wrong_sizes(path: Path, entries: dict[str, Entry], places: dict[str, _Place]) -> Iterator[str]:
    for name, (_, _, begin, end) in places.items():
        needed_bytes = entries[name].nbytes
        if end - begin != needed_bytes:
            yield (
                f"{path.name}: {name} has {end - begin} bytes, not the {needed_bytes} of its "
                f"dtype and shape"
            )


def _gaps(path: Path, places: dict[str, _Place]) -> Iterator[str]:
    """Holes before, between and overlaps of tensors, in the order of their bytes."""
    before, last = "the header", 0
    for begin, end, name in sorted((place[2], place[3], name) for name, place in places.items()):
        if begin > last:
            yield f"{path.name}: {begin - last} bytes between {before} and {name} are no tensor's"
        elif begin < last:
            yield f"{path.name}: {name} and {before} overlap by {last - begin} bytes"
        if end >= last:
            before, last = name, end
