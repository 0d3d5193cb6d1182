"""Which ids were seen: 16 bytes a row, exact up to a hash of 128 bits.

It keeps sorted runs of hashes and no positions; who finds a repeated id looks its first place up.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Halves = npt.NDArray[np.uint64]

_MAX_RUN = 1 << 20  # hashes in one run: what a merge holds twice


def id_hash(typed_id: str | int) -> bytes:
    """16 bytes of blake2b; 7 and "7" differ."""
    kind = "i" if isinstance(typed_id, int) else "s"
    return hashlib.blake2b(f"{kind}{typed_id}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class _Run:
    """Hashes, each as two numbers, in the order of the first ones."""

    firsts: Halves
    seconds: Halves

    def __len__(self) -> int:
        return len(self.firsts)

    @property
    def nbytes(self) -> int:
        return self.firsts.nbytes + self.seconds.nbytes

    def take(self, places: npt.NDArray[np.intp]) -> "_Run":
        return _Run(self.firsts[places], self.seconds[places])

    def holds(self, other: "_Run") -> npt.NDArray[np.bool_]:
        """Which hashes of another are here."""
        places = np.searchsorted(self.firsts, other.firsts)
        places[places == len(self)] = 0
        found: npt.NDArray[np.bool_] = self.firsts[places] == other.firsts
        for position in np.flatnonzero(found).tolist():  # few: ids that repeat
            after = np.searchsorted(self.firsts, other.firsts[position], side="right")
            found[position] = other.seconds[position] in self.seconds[places[position] : after]
        return found


class IdIndex:
    """A set of ids that only grows."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, ids: Sequence[str | int]) -> list[int]:
        """Add `ids`; the positions among them that repeat an id of before or of this call."""
        if not ids:
            return []
        halves = np.frombuffer(b"".join(map(id_hash, ids)), np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        run = _Run(halves[order, 0], halves[order, 1])
        repeats = np.zeros(len(run), dtype=bool)
        repeats[1:] = (run.firsts[1:] == run.firsts[:-1]) & (run.seconds[1:] == run.seconds[:-1])
        for known in self._runs:
            repeats |= known.holds(run)
        self._keep(run.take(np.flatnonzero(~repeats)))
        return sorted(int(position) for position in order[repeats])

    def _keep(self, run: _Run) -> None:
        """Append a run, merging smaller ones so that few are left."""
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            if len(self._runs[-1]) + len(run) > _MAX_RUN:
                break
            run = _merged(self._runs.pop(), run)
        if len(run):
            self._runs.append(run)


def _merged(a: _Run, b: _Run) -> _Run:
    firsts = np.concatenate([a.firsts, b.firsts])
    order = np.argsort(firsts, kind="stable")
    return _Run(firsts[order], np.concatenate([a.seconds, b.seconds])[order])
