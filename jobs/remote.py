"""Paths in an object store, used like local ones for all that reads.

A `RemotePath` is a `Path` by its names; what it says of the store is asked anew each time. There
are no folders in a store: one is there as long as something lies below it. What writes is the
`RemoteStore`.
"""

import errno
import io
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, cast

import pyarrow as pa

from batchmla.jobs.remote_calls import Patience, call, filesystem, is_url

_SHORTENED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")  # what pathlib leaves of a URL
_FILE = "file://"
_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "blob_id")
_TIMES = ("LastModified", "mtime", "updated", "modified", "last_modified", "created")
BLOCK_BYTES = 8 << 20  # of one read of the store


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFacts:
    """What a store says of one object. `tag` changes with the content; None where none is kept."""

    url: str
    num_bytes: int
    mtime_ns: int
    tag: str | None

    @classmethod
    def of(cls, url: str, raw: dict[str, Any]) -> "ObjectFacts":
        """From an entry of a listing."""
        tag = next((str(raw[key]).strip('"') for key in _TAGS if raw.get(key)), None)
        when = next((raw[key] for key in _TIMES if raw.get(key) is not None), 0)
        return cls(url=url, num_bytes=int(raw["size"] or 0), mtime_ns=_time_ns(when), tag=tag)


def _time_ns(when: object) -> int:
    if isinstance(when, str):
        when = datetime.fromisoformat(when.replace("Z", "+00:00"))
    if isinstance(when, datetime):
        when = when.timestamp()
    return int(when * 1e9) if isinstance(when, int | float) else 0


class RemotePath(PosixPath):
    """A place in an object store; `str` gives its URL."""

    def __str__(self) -> str:
        return _SHORTENED.sub(r"\1://", super().__str__(), count=1)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        return str(self)

    def _info(self) -> dict[str, Any] | None:
        url, system = str(self), filesystem(str(self))
        try:
            found: dict[str, Any] = call(url, lambda: system.info(url))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found

    def facts(self) -> ObjectFacts | None:
        """Of the object with exactly this name, None when there is none."""
        raw = self._info()
        if raw is None or raw["type"] == "directory":
            return None
        return ObjectFacts.of(str(self), raw)

    def entries(self) -> list[dict[str, Any]]:
        """What lies directly below, as fsspec lists it; nothing where nothing does."""
        url, system = str(self), filesystem(str(self))
        try:
            found: list[dict[str, Any]] = call(url, lambda: system.ls(url, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = system._strip_protocol(url).rstrip("/")
        return [each for each in found if each["name"].rstrip("/") != own]

    def files(self) -> list["RemotePath"]:
        """The objects directly below."""
        listed = (each for each in self.entries() if each["type"] != "directory")
        return [self / posixpath.basename(each["name"]) for each in listed]

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self._info() is not None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self.facts() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        raw = self._info()
        return raw is not None and raw["type"] == "directory"

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator["RemotePath"]:  # type: ignore[override]
        for each in self.entries():
            yield self / posixpath.basename(each["name"].rstrip("/"))

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        facts = self.facts()
        if facts is None:
            raise FileNotFoundError(errno.ENOENT, "it is not there", str(self))
        mtime_s = facts.mtime_ns // 10**9
        return os.stat_result((0o100644, 0, 0, 1, 0, 0, facts.num_bytes, 0, mtime_s, 0))

    def read_bytes(self) -> bytes:
        return self.fetch()

    def fetch(self, patience: Patience | None = None) -> bytes:
        """All bytes, tried for as long as `patience` says."""
        url, system = str(self), filesystem(str(self))
        return cast(bytes, call(url, lambda: system.cat_file(url), patience))

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any:
        """For reading; the bytes come in ranges as they are asked for."""
        if mode not in ("r", "rb", "rt"):
            raise io.UnsupportedOperation(f"{self} cannot be opened for writing")
        stream = open_ranges(self, buffering if buffering > 0 else BLOCK_BYTES)
        return stream if mode == "rb" else io.TextIOWrapper(stream, encoding, errors, newline)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder comes with what is put into it."""


class _Ranges(io.RawIOBase):
    """An object of known length, read by ranges."""

    def __init__(self, url: str, num_bytes: int) -> None:
        self._url = url
        self._system = filesystem(url)
        self._num_bytes = num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        start, stop = self._at, min(self._at + len(buffer), self._num_bytes)
        if stop <= start:
            return 0
        data = call(self._url, lambda: self._range(start, stop))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _range(self, start: int, stop: int) -> bytes:
        data: bytes = self._system.cat_file(self._url, start=start, end=stop)
        if len(data) != stop - start:
            raise TimeoutError(f"{len(data)} of {stop - start} bytes came")
        return data


def open_ranges(path: RemotePath, buffer_bytes: int = BLOCK_BYTES) -> BinaryIO:
    """An object for reading from front to back, `buffer_bytes` at a time."""
    return cast(BinaryIO, io.BufferedReader(_ranges(path), buffer_bytes))


def _ranges(path: RemotePath) -> _Ranges:
    facts = path.facts()
    if facts is None:
        raise FileNotFoundError(errno.ENOENT, "it is not there", str(path))
    return _Ranges(facts.url, facts.num_bytes)


def place_of(path: str | Path) -> Path:
    """A path of a job file or of the command line: a `RemotePath` where it is a URL."""
    text = str(path)
    if isinstance(path, RemotePath):
        return path
    if isinstance(path, Path):
        text = _SHORTENED.sub(r"\1://", text, count=1)
    return RemotePath(text) if is_url(text) else Path(local_text(text))


def local_text(path: str) -> str:
    """A path without `file://`, if that is before it."""
    return "/" + path.removeprefix(_FILE).lstrip("/") if path.startswith(_FILE) else path


def parquet_source(path: Path) -> Any:
    """What pyarrow reads a Parquet file of any place from."""
    return pa.PythonFile(_ranges(path), mode="r") if isinstance(path, RemotePath) else path


def whole_source(path: Path) -> Any:
    """The same for a small file, of which all is needed: one read of the store."""
    return pa.BufferReader(path.read_bytes()) if isinstance(path, RemotePath) else path


def files_in(folder: Path) -> list[Path]:
    """The files directly in a folder of any place, none if it is not there."""
    if isinstance(folder, RemotePath):
        return list(folder.files())
    if not folder.exists():
        return []
    return [Path(each.path) for each in os.scandir(folder) if each.is_file()]
