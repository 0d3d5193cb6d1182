"""Which input rows are done: one bit a row."""

import numpy as np
import numpy.typing as npt

_SCAN_BYTES = 4096

Indices = npt.NDArray[np.int64]


class DoneRows:
    """A growing set of row indices. One thread marks; others may ask at the same time."""

    def __init__(self) -> None:
        self._bits = np.zeros(1024, dtype=np.uint8)
        self._first_missing = 0
        self.count = 0

    def __contains__(self, index: int) -> bool:
        bits, byte = self._bits, index >> 3
        return byte < len(bits) and bool(bits[byte] >> (index & 7) & 1)

    def mark(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """Adds distinct `indices`; true where an index is new."""
        if not len(indices):
            return np.zeros(0, dtype=np.bool_)
        self._grow(int(indices.max()) + 1)
        is_new: npt.NDArray[np.bool_] = self._read(indices) == 0
        fresh = indices[is_new]
        np.bitwise_or.at(self._bits, fresh >> 3, self._masks(fresh))
        self.count += len(fresh)
        return is_new

    def mark_range(self, start: int, stop: int) -> None:
        """Adds start ≤ index < stop, none of which is in yet."""
        self._grow(stop)
        for first in range(start, stop, 1 << 16):
            self.mark(np.arange(first, min(first + (1 << 16), stop), dtype=np.int64))

    def unmark(self, indices: Indices) -> None:
        """Takes out distinct `indices` that are in."""
        np.bitwise_and.at(self._bits, indices >> 3, ~self._masks(indices))
        self.count -= len(indices)
        self._first_missing = min(self._first_missing, int(indices.min(initial=1 << 62)))

    def missing(self, start: int, stop: int) -> Indices:
        """The indices of start ≤ index < stop that are not in."""
        bits = self._bits  # another thread may replace it by a longer one
        indices = np.arange(start, stop, dtype=np.int64)
        is_in = np.zeros(len(indices), dtype=np.bool_)
        known = max(0, min(len(bits) * 8, stop) - start)
        is_in[:known] = bits[indices[:known] >> 3] & self._masks(indices[:known])
        return indices[~is_in]

    def first_missing(self) -> int:
        """The least index that is not in."""
        byte = self._first_missing >> 3
        while not len(holes := np.flatnonzero(self._bits[byte : byte + _SCAN_BYTES] != 0xFF)):
            byte = min(byte + _SCAN_BYTES, len(self._bits))
            self._grow((byte + 1) * 8)
        byte += int(holes[0])
        value = int(self._bits[byte])
        low_bit = ~value & (value + 1)
        self._first_missing = byte * 8 + low_bit.bit_length() - 1
        return self._first_missing

    def _read(self, indices: Indices) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = self._bits[indices >> 3] & self._masks(indices)
        return found

    @staticmethod
    def _masks(indices: Indices) -> npt.NDArray[np.uint8]:
        masks: npt.NDArray[np.uint8] = np.left_shift(1, indices & 7).astype(np.uint8)
        return masks

    def _grow(self, num_rows: int) -> None:
        wanted = (num_rows + 7) // 8
        if wanted > len(self._bits):
            bits = np.zeros(max(wanted, len(self._bits) * 2), dtype=np.uint8)
            bits[: len(self._bits)] = self._bits
            self._bits = bits
