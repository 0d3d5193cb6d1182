"""The small tensors whose values are looked at before anything is loaded: norms, biases, scales.

One of them with a value that is not finite, or a norm of nothing but zeros, spoils every row that
is run. Matrices and scales beyond `TINY_BYTES` are not read here.
"""

import errno
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchmla.placement import Placement
from batchmla.weights.checkpoint import Checkpoint
from batchmla.weights.faults import AGAIN, Fault, Faults
from batchmla.weights.rules import Rule, Skip, expand

TINY_BYTES = 64 * 1024
GAP_BYTES = 256 * 1024  # between tensors that are read at once
RUN_BYTES = 16 * 2**20  # read at once
SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
# by dtype: the words that hold a value, the exponent whose bits are all ones in what is not finite,
# and the bits that make a value other than zero; of E4M3 only NaN has none, and E8M0 has no zero
BITS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    "F32": ("<u4", 0x7F80_0000, 0x7FFF_FFFF),
    "BF16": ("<u2", 0x7F80, 0x7FFF),
    "F16": ("<u2", 0x7C00, 0x7FFF),
    "F8_E4M3": ("<u1", 0x7F, 0x7F),
    "F8_E5M2": ("<u1", 0x7C, 0x7F),
    "F8_E8M0": ("<u1", 0xFF, 0xFF),
    "U8": ("<u1", 0xFF, 0xFF),  # the same by its older name
}


class Small(NamedTuple):
    """A tensor to look at, between two bytes of its file; `is_norm`: zeros alone are a fault."""

    start: int
    end: int
    name: str
    dtype: str
    is_norm: bool


def check_values(checkpoint: Checkpoint, rules: Sequence[Rule | Skip], faults: Faults) -> None:
    """Adds a fault for every small tensor that cannot be right; those of damaged files are not
    looked at."""
    by_file: dict[Path, list[Small]] = {}
    for name, is_norm in itertools.chain(_vectors(rules), _scales(checkpoint)):
        entry = checkpoint.entries.get(name)
        if entry is None or entry.dtype not in BITS or entry.file in checkpoint.damaged:
            continue
        num_bytes = entry.nbytes
        if num_bytes <= TINY_BYTES:
            small = Small(entry.start, entry.start + num_bytes, name, entry.dtype, is_norm)
            by_file.setdefault(entry.file, []).append(small)
    runs = {path: list(_runs(sorted(smalls))) for path, smalls in by_file.items()}
    skips = [rule for rule in rules if isinstance(rule, Skip)]
    for look in (_announce, _look):
        for path, of_file in runs.items():
            faults.take(
                fault
                for name, fault in look(path, of_file)
                if not any(skip.covers(name) for skip in skips)
            )


_Named = tuple[str, bool]  # a tensor, and whether it is a norm that may not be zero


def _vectors(rules: Iterable[Rule | Skip]) -> Iterator[_Named]:
    for rule in rules:
        if isinstance(rule, Skip) or len(rule.shape) != 1 or rule.is_integer:
            continue
        is_norm = "norm" in rule.target and not rule.target.endswith("bias")
        for piece in expand([rule], Placement()):
            yield piece.source, is_norm and not rule.may_be_zero


def _scales(checkpoint: Checkpoint) -> Iterator[_Named]:
    return ((name, False) for name in checkpoint.entries if name.endswith(SCALES))


_Run = list[Small]  # near one another, in the order of their bytes
_Found = tuple[str, Fault]  # a tensor's name, and what is wrong with it


def _runs(smalls: Iterable[Small]) -> Iterator[_Run]:
    run: _Run = []
    for small in smalls:
        if run and (small.start - run[-1].end > GAP_BYTES or small.end - run[0].start > RUN_BYTES):
            yield run
            run = []
        run.append(small)
    if run:
        yield run


def _announce(path: Path, runs: Iterable[_Run]) -> list[_Found]:
    """Asks the system to fetch what `_look` will read, without waiting for it."""
    if not hasattr(os, "posix_fadvise"):
        return []
    try:
        with path.open("rb", buffering=0) as file:
            for run in runs:
                start = run[0].start
                num_bytes = run[-1].end - start
                os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_WILLNEED)
    except OSError:
        return []  # a hint that is not taken; reading tells of what cannot be read
    return []


def _look(path: Path, runs: Iterable[_Run]) -> list[_Found]:
    """The faults of some tensors of one file, neighbours read together."""
    found: list[_Found] = []
    try:
        with path.open("rb", buffering=0) as file:
            for run in runs:
                start, end = run[0].start, run[-1].end
                data = os.pread(file.fileno(), end - start, start)
                if len(data) < end - start:
                    raise OSError(errno.EIO, "it ended while it was read")
                found += _look_at(run, np.frombuffer(data, np.uint8), start)
    except OSError as error:
        text = f"{path.name} cannot be read ({error.strerror})"
        found.append((path.name, Fault("unreadable", text, AGAIN)))
    return found


def _look_at(run: Iterable[Small], data_B: npt.NDArray[np.uint8], start: int) -> Iterator[_Found]:
    """`data_B` begins at the file's byte `start`."""
    for small in run:
        words, exponent, value = BITS[small.dtype]
        bits = data_B[small.start - start : small.end - start].view(words)
        bad = (bits & exponent) == exponent
        if bad.any():
            text = f"{small.name} holds {bad.sum()} of {len(bits)} values that are not finite"
            yield small.name, Fault("not finite", text, AGAIN)
        elif small.is_norm and len(bits) and not np.any(bits & value):
            text = f"{small.name} is a norm of zeros alone"
            yield small.name, Fault("zero", text, AGAIN)
