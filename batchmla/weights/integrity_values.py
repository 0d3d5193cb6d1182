"""The small tensors whose values are looked at before anything is loaded: norms, biases, scales.

One of them with a value that is not finite, or a norm of nothing but zeros, spoils every row that
is run. Matrices and scales beyond `TINY_BYTES` are not read here.
"""

import errno
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from batchmla.placement import Placement
from batchmla.weights.checkpoint import READERS, Checkpoint
from batchmla.weights.faults import AGAIN, Fault, Faults
from batchmla.weights.header import Entry
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
}


@dataclass(frozen=True, slots=True)
class Small:
    """A tensor to look at; `is_norm`: zeros alone are a fault."""

    name: str
    entry: Entry
    is_norm: bool = False


def check_values(checkpoint: Checkpoint, rules: Sequence[Rule | Skip], faults: Faults) -> None:
    """Adds a fault for every small tensor that cannot be right; those of damaged files are not
    looked at."""
    by_file: dict[Path, list[Small]] = {}
    for small in itertools.chain(_vectors(checkpoint, rules), _scales(checkpoint, rules)):
        if small.entry.file not in checkpoint.damaged:
            by_file.setdefault(small.entry.file, []).append(small)
    with ThreadPoolExecutor(READERS) as pool:
        for found in pool.map(_look, by_file, by_file.values()):
            faults.take(found)


def _vectors(checkpoint: Checkpoint, rules: Iterable[Rule | Skip]) -> Iterator[Small]:
    for rule in rules:
        if isinstance(rule, Skip) or len(rule.shape) != 1 or rule.is_integer:
            continue
        is_norm = "norm" in rule.target and not rule.target.endswith("bias")
        for piece in expand([rule], Placement()):
            entry = checkpoint.entries.get(piece.source)
            if _is_readable(entry):
                yield Small(piece.source, entry, is_norm and not rule.may_be_zero)


def _scales(checkpoint: Checkpoint, rules: Iterable[Rule | Skip]) -> Iterator[Small]:
    skips = [rule for rule in rules if isinstance(rule, Skip)]
    for name, entry in checkpoint.entries.items():
        is_scale = name.endswith(SCALES) and _is_readable(entry)
        if is_scale and not any(skip.covers(name) for skip in skips):
            yield Small(name, entry)


def _is_readable(entry: Entry | None) -> TypeGuard[Entry]:
    return entry is not None and entry.dtype in BITS and entry.nbytes <= TINY_BYTES


def _look(path: Path, smalls: Sequence[Small]) -> list[Fault]:
    """The faults of some tensors of one file, neighbours read together."""
    found: list[Fault] = []
    try:
        with path.open("rb", buffering=0) as file:
            for run in _runs(sorted(smalls, key=lambda small: small.entry.start)):
                start, end = run[0].entry.start, _end(run[-1])
                data = os.pread(file.fileno(), end - start, start)
                if len(data) < end - start:
                    raise OSError(errno.EIO, "it ended while it was read")
                found += _look_at(run, np.frombuffer(data, np.uint8), start)
    except OSError as error:
        found.append(Fault("unreadable", f"{path.name} cannot be read ({error.strerror})", AGAIN))
    return found


def _end(small: Small) -> int:
    return small.entry.start + small.entry.nbytes


def _runs(smalls: Iterable[Small]) -> Iterator[list[Small]]:
    """Tensors that lie near one another, in the order of their bytes."""
    run: list[Small] = []
    for small in smalls:
        if run and (
            small.entry.start - _end(run[-1]) > GAP_BYTES
            or _end(small) - run[0].entry.start > RUN_BYTES
        ):
            yield run
            run = []
        run.append(small)
    if run:
        yield run


def _look_at(run: Iterable[Small], data_B: npt.NDArray[np.uint8], start: int) -> Iterator[Fault]:
    """`data_B` begins at the file's byte `start`."""
    for small in run:
        words, exponent, value = BITS[small.entry.dtype]
        at = small.entry.start - start
        bits = data_B[at : at + small.entry.nbytes].view(words)
        bad = int(np.count_nonzero((bits & exponent) == exponent))
        if bad:
            text = f"{small.name} holds {bad} of {len(bits)} values that are not finite"
            yield Fault("not finite", text, AGAIN)
        elif small.is_norm and len(bits) and not np.any(bits & value):
            yield Fault("zero", f"{small.name} is a norm of zeros alone", AGAIN)
