"""What is wrong with a model's folder, gathered fault by fault and told in one sentence."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchmla.errors import JobError

MAX_LISTED = 8  # faults of one kind that are named; the others are counted
AGAIN = "download the model again"
REVISION = f"{AGAIN}, config and weights of one revision"
PULL = "run git lfs pull in that folder"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `kind` completes "7 more are …", `way_out` says what helps against it."""

    kind: str
    text: str
    way_out: str


class Faults:
    """The faults of one folder, bounded by kind; a way out that several have is given once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: list[Fault] = []

    def add(self, kind: str, texts: Iterable[str], way_out: str) -> None:
        """Several of one kind."""
        self._found += [Fault(kind, text, way_out) for text in texts]

    def take(self, faults: Iterable[Fault]) -> None:
        """Those that were found elsewhere."""
        self._found += faults

    @property
    def count(self) -> int:
        """All of them, named or not."""
        return len(self._found)

    def refuse(self) -> None:
        """Raises them all in one `JobError`; returns if there are none."""
        if not self._found:
            return
        by_kind: dict[str, list[str]] = {}
        for fault in self._found:
            by_kind.setdefault(fault.kind, []).append(fault.text)
        told = "; ".join(text for kind, texts in by_kind.items() for text in bounded(texts, kind))
        raise JobError(
            f"the model in {self.folder} cannot be used ({counted(self.count, 'fault')}): {told}: "
            f"{self._ways_out()}"
        )

    def _ways_out(self) -> str:
        ways = list(dict.fromkeys(fault.way_out for fault in self._found))
        kept = [way for way in ways if not any(way != more and way in more for more in ways)]
        return ", or ".join(kept)


def bounded(texts: Sequence[str], kind: str) -> list[str]:
    """The first few of many faults of one kind, then how many more are `kind`."""
    listed = list(texts[:MAX_LISTED])
    more = len(texts) - len(listed)
    return [*listed, f"{more:,} more are {kind}"] if more else listed


def counted(count: int, noun: str) -> str:
    """Like "1 tensor" and "2 tensors"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
