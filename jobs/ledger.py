"""The ledger: one line for every part we publish, written before the part appears.

It says which rows a part holds, so that any part can be missing, damaged or of another size without
moving the rows of the others, and which files of the folder are ours.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchmla.errors import JobError
from batchmla.jobs.store import Store

_PART = re.compile(r"part-(\d{5,})\.parquet")


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
    """Rows start ≤ index < stop in the file `part-<number>.parquet`."""

    number: int
    start: int
    stop: int
    tally: Tally = field(default_factory=Tally)

    @property
    def name(self) -> str:
        return f"part-{self.number:05d}.parquet"


class Ledger:
    """The file `parts.jsonl`. The last line about a part counts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.path = store.own / "parts.jsonl"

    def add(self, part: Part) -> None:
        """Durable when this returns; only then may the part be published."""
        line = json.dumps(asdict(part)).encode()
        self._store.append(self.path, b"\n" + line + b"\n")  # the last line may be cut off

    def read(self) -> list[Part]:
        """Every part ever announced, by number. A line cut off by a crash is no line."""
        if not self.path.exists():
            return []
        parts: dict[int, Part] = {}
        for line in self.path.read_bytes().split(b"\n"):
            try:
                raw = json.loads(line)
                part = Part(**{**raw, "tally": Tally(**raw["tally"])})
            except (ValueError, TypeError, KeyError):
                continue
            parts[part.number] = part
        return [parts[number] for number in sorted(parts)]

    def tally(self) -> Tally:
        """Sums over all parts announced."""
        total = Tally()
        for part in self.read():
            total.add(part.tally)
        return total

    def published(self, schema: pa.Schema) -> Iterator[tuple[Part, bool]]:
        """The parts up to the last one that is there, each with whether it is there and sound."""
        announced = self.read()
        self._refuse_foreign({part.name for part in announced})
        is_sound = [_is_sound(self._store.root / part.name, part, schema) for part in announced]
        while is_sound and not is_sound[-1]:
            is_sound.pop()
        yield from zip(announced, is_sound, strict=False)

    def _refuse_foreign(self, ours: set[str]) -> None:
        for path in sorted(self._store.root.iterdir()):
            if _PART.fullmatch(path.name) and path.name not in ours:
                raise JobError(
                    f"{path} was not written by this job; move it away, or choose another "
                    f"output.path"
                )


def _is_sound(path: Path, part: Part, schema: pa.Schema) -> bool:
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException):
        return False
    return bool(file.metadata.num_rows == part.stop - part.start) and bool(
        file.schema_arrow.equals(schema)
    )
