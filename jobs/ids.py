"""Which ids were seen: 16 bytes a row, exact up to a hash of 128 bits.

It keeps sorted runs of hashes and no positions; who finds a repeated id looks its first place up.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.bytes_]  # [n] of dtype S16

_MAX_RUN = 1 << 20  # hashes in one run: what a merge holds twice


def id_hash(typed_id: str | int) -> bytes:
    """16 bytes of blake2b; 7 and "7" differ."""
    kind = "i" if isinstance(typed_id, int) else "s"
    return hashlib.blake2b(f"{kind}{typed_id}".encode(), digest_size=16).digest()


class IdIndex:
    """A set of ids that only grows."""

    def __init__(self) -> None:
        self._runs: list[Hashes] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def add(self, ids: Sequence[str | int]) -> list[int]:
        """Add `ids`; the positions among them that repeat an id of before or of this call."""
        if not ids:
            return []
        hashes = np.frombuffer(b"".join(map(id_hash, ids)), dtype="S16")
        order = np.argsort(hashes, kind="stable")
        run = hashes[order]
        repeats = np.zeros(len(run), dtype=bool)
        repeats[1:] = run[1:] == run[:-1]
        for known in self._runs:
            place = np.searchsorted(known, run)
            place[place == len(known)] = 0
            repeats |= known[place] == run
        self._keep(run[~repeats])
        return sorted(int(position) for position in order[repeats])

    def _keep(self, run: Hashes) -> None:
        """Append a run, merging smaller ones so that few are left."""
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            if len(self._runs[-1]) + len(run) > _MAX_RUN:
                break
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")
        if len(run):
            self._runs.append(run)
