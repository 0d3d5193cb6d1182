"""The ledger: one line for every part we publish, written before the part appears.

It says which rows a part holds, so that any part can be missing, damaged or of another size without
moving the rows of the others, and which files of the folder are ours.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchmla.errors import JobError
from batchmla.jobs.remote import files_in, parquet_source
from batchmla.jobs.store import Store, storage_errors

_PART = re.compile(r"part-(\d{5,})\.(parquet|jsonl)")
_STAMP_BYTES = 65536


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over finished rows."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    content_tokens: int = 0

    def add(self, other: "Tally", sign: int = 1) -> None:
        """Adds (or with sign -1 takes away) another tally."""
        for each in fields(self):
            value = getattr(self, each.name) + sign * getattr(other, each.name)
            setattr(self, each.name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows start ≤ index < stop in the file `part-<number>.<ending>`.

    `stamp` tells this version of the file from others: a part is written again when its last rows
    come later, or when failed rows were retried.
    """

    number: int
    start: int
    stop: int
    tally: Tally = field(default_factory=Tally)
    stamp: str | None = None
    ending: str = "parquet"  # or jsonl

    @property
    def name(self) -> str:
        return f"part-{self.number:05d}.{self.ending}"


class Ledger:
    """The file `parts.jsonl`: every version of every part, the newest last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.path = store.own / "parts.jsonl"

    def announce(self, part: Part, made: Path) -> Part:
        """Notes the finished file `made`, which may be published once this returns: durable."""
        with storage_errors(made):
            stamped = replace(part, stamp=stamp_of(made))
        line = json.dumps(asdict(stamped)).encode()
        self._store.append(self.path, b"\n" + line + b"\n")  # the last line may be cut off
        return stamped

    def remove(self) -> None:
        """Forgets every part."""
        self._store.remove_appended(self.path)

    def read(self) -> list[Part]:
        """The newest version of every part ever announced, by number."""
        return [versions[-1] for versions in self._versions()]

    def present(self) -> list[Part]:
        """The parts whose files are there, each in the version that lies there."""
        found = []
        for versions in self._versions():
            path = self._store.root / versions[-1].name
            if path.exists():
                found.append(_version_of(path, versions) or versions[-1])
        return found

    def tally(self) -> Tally:
        """Sums over the parts that are there."""
        total = Tally()
        for part in self.present():
            total.add(part.tally)
        return total

    def published(self, schema: pa.Schema) -> Iterator[tuple[Part, bool]]:
        """The parts up to the last one that is there, each with whether it is there and sound."""
        announced = self._versions()
        self._refuse_foreign({versions[-1].name for versions in announced})
        found: list[tuple[Part, bool]] = []
        for versions in announced:
            path = self._store.root / versions[-1].name
            version = _version_of(path, versions)
            if version is None:
                found.append((versions[-1], _is_sound(path, versions[-1], schema)))
            else:
                found.append((version, True))
        while found and not found[-1][1]:
            found.pop()
        for (part, is_sound), versions in zip(found[:-1], announced, strict=False):
            is_whole = (part.start, part.stop) == (versions[-1].start, versions[-1].stop)
            yield (part, is_sound) if is_whole else (versions[-1], False)
        yield from found[-1:]

    def _versions(self) -> list[list[Part]]:
        """Per part, by number, every version, the newest last. A line cut off is no line."""
        parts: dict[int, list[Part]] = {}
        for line in self._store.read_appended(self.path).split(b"\n"):
            try:
                raw = json.loads(line)
                part = Part(**{**raw, "tally": Tally(**raw["tally"])})
            except (ValueError, TypeError, KeyError):
                continue
            parts.setdefault(part.number, []).append(part)
        return [parts[number] for number in sorted(parts)]

    def _refuse_foreign(self, ours: set[str]) -> None:
        for path in sorted(files_in(self._store.root)):
            if _PART.fullmatch(path.name) and path.name not in ours:
                raise JobError(
                    f"{path} was not written by this job; move it away, or choose another "
                    f"output.path"
                )


def stamp_of(path: Path) -> str:
    """Size and a hash of the end of a file, where Parquet keeps the sizes of all its columns."""
    with path.open("rb") as file:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, num_bytes - _STAMP_BYTES))
        return f"{num_bytes}-{hashlib.blake2b(file.read(), digest_size=8).hexdigest()}"


def _version_of(path: Path, versions: Sequence[Part]) -> Part | None:
    """Which of the announced versions the file is, if any."""
    try:
        stamp = stamp_of(path)
    except OSError:
        return None
    return next((part for part in reversed(versions) if part.stamp == stamp), None)


def _is_sound(path: Path, part: Part, schema: pa.Schema) -> bool:
    """Whether a file of unknown origin has the rows and columns of `part`."""
    if part.ending == "jsonl":
        return _has_lines(path, part.stop - part.start)
    try:
        file = pq.ParquetFile(parquet_source(path))
    except (OSError, pa.ArrowException):
        return False
    return bool(file.metadata.num_rows == part.stop - part.start) and bool(
        file.schema_arrow.equals(schema)
    )


def _has_lines(path: Path, num_lines: int) -> bool:
    """Whether a file is so many whole lines."""
    found, last = 0, b"\n"
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found, last = found + block.count(b"\n"), block[-1:]
    except OSError:
        return False
    return found == num_lines and last == b"\n"
