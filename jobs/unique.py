"""Whether the ids of a column are all different, told without looking each one up.

Ids are hashed to 64 bits, a whole array at a time. Where no two hashes are equal no two ids are;
where two are, or an id is null or no text, the answer is left to whoever looks more closely.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

Hashes = npt.NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's fraction: its multiples spread well
_SHIFT = np.uint64(32)
_WORD = 8  # bytes
_MAX_BYTES = 1024  # of one id
_KEPT: Hashes = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)


class DistinctIds:
    """Ids of one column, array after array; 8 bytes are kept for each."""

    def __init__(self) -> None:
        self._hashes: list[Hashes] = []
        self._is_clear = True

    def add(self, ids: pa.Array) -> bool:
        """Takes the next ids. False: the answer is no already."""
        found = _hashes(ids) if self._is_clear and not ids.null_count else None
        if found is None:
            self._is_clear = False
            self._hashes.clear()
        else:
            self._hashes.append(found)
        return self._is_clear

    def are_distinct(self) -> bool:
        """True: no id is null, unreadable or there twice. False: one of these may be so."""
        if not self._is_clear or not self._hashes:
            return self._is_clear
        hashes = np.concatenate(self._hashes)
        self._hashes.clear()
        hashes.sort()
        return not bool((hashes[1:] == hashes[:-1]).any())


def _hashes(ids: pa.Array) -> Hashes | None:
    """None for what is neither whole numbers nor valid text of usual length."""
    if types.is_integer(ids.type):
        numbers: Hashes = ids.to_numpy().astype(np.int64, copy=False).view(np.uint64)
        return numbers if not types.is_uint64(ids.type) else ids.to_numpy()
    if not (types.is_string(ids.type) or types.is_large_string(ids.type)):
        return None
    try:
        ids.validate(full=True)
    except pa.ArrowInvalid:
        return None
    wide = np.int64 if types.is_large_string(ids.type) else np.int32
    _, offset_buffer, data = ids.buffers()
    offsets = np.frombuffer(offset_buffer, wide)[ids.offset : ids.offset + len(ids) + 1]
    return _text_hashes(offsets.astype(np.int64), data)


def _text_hashes(offsets: npt.NDArray[np.int64], data: pa.Buffer | None) -> Hashes | None:
    """Of the bytes between neighbouring `offsets`: eight at a time, each mixed into the hash."""
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=0))
    if longest > _MAX_BYTES:
        return None
    hashes: Hashes = lengths.astype(np.uint64) * _ODD
    if not longest:
        return hashes
    first = int(offsets[0])
    assert data is not None, "text has bytes"
    text = bytes(memoryview(data)[first : int(offsets[-1])]) + bytes(_WORD)
    words = np.ndarray((len(text) - _WORD + 1,), np.dtype("<u8"), text, strides=(1,))
    starts = offsets[:-1] - first
    for at in range(0, longest, _WORD):
        rows = np.flatnonzero(lengths > at)
        word = words[starts[rows] + at] & _KEPT[np.minimum(lengths[rows] - at, _WORD)]
        mixed = (hashes[rows] ^ word) * _ODD
        hashes[rows] = (mixed ^ (mixed >> _SHIFT)) * _ODD
    return hashes
