"""Safetensors files opened by their headers; tensors are read later, by slices, memory-mapped."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import safe_open

from batchmla.errors import JobError
from batchmla.weights.folder import LFS_POINTER, refuse_pointer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LENGTH_BYTES = 8
MAX_LISTED = 8  # faults of one kind that are named; the others are counted
AGAIN = "download the model again"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor, as the header of its file has it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder by name. Files are mapped when first read and kept until `close`."""

    def __init__(
        self, folder: Path, entries: Mapping[str, Entry], lost: frozenset[str] = frozenset()
    ) -> None:
        """`lost`: tensors of files that are not there or cannot be read."""
        self.folder = folder
        self.entries = entries
        self.lost = lost
        self._open: dict[Path, Any] = {}

    @staticmethod
    def open(folder: Path) -> "Checkpoint":
        """Reads headers only; every fault of every file is in one `JobError`."""
        faults: list[str] = []
        entries: dict[str, Entry] = {}
        for path, names in _find_files(folder, faults).items():
            found = _read_header(path, faults)
            if found is None:
                continue
            lacking = [name for name in names or () if name not in found]
            faults += bounded([f"{path.name} lacks {name}" for name in lacking], "missing there")
            twice = [name for name in found if name in entries]
            faults += bounded(
                [f"{name} is in {entries[name].file.name} and in {path.name}" for name in twice],
                "in both",
            )
            entries |= found
        if faults:
            raise JobError(
                f"the weights in {folder} cannot be used: {'; '.join(faults)}: {_way_out(faults)}"
            )
        return Checkpoint(folder, entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(
            math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] for entry in self.entries.values()
        )

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A slice of one tensor, in the checkpoint's dtype; only its bytes are touched."""
        entry = self.entries[name]
        if entry.file not in self._open:
            self._open[entry.file] = safe_open(entry.file, framework="pt")
        if not slices:
            scalar: torch.Tensor = self._open[entry.file].get_tensor(name)
            return scalar
        part: torch.Tensor = self._open[entry.file].get_slice(name)[slices]
        return part

    def close(self) -> None:
        """Unmaps the files."""
        self._open.clear()


def bounded(faults: Sequence[str], what: str) -> list[str]:
    """The first few of many faults of one kind, then how many more are `what`."""
    listed = list(faults[:MAX_LISTED])
    more = len(faults) - len(listed)
    return [*listed, f"{more:,} more are {what}"] if more else listed


def counted(count: int, noun: str) -> str:
    """Like "1 tensor" and "2 tensors"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _way_out(faults: Sequence[str]) -> str:
    if any("git-LFS pointer" in fault for fault in faults):
        return "run git lfs pull in that folder"
    return AGAIN


def _find_files(folder: Path, faults: list[str]) -> dict[Path, list[str] | None]:
    """Each file with the tensors the index expects in it; None: no index."""
    for name in (INDEX, SINGLE):
        if (folder / name).is_dir():
            raise JobError(f"{folder / name} is a folder where a file should be; {AGAIN}")
    if (folder / INDEX).is_file():
        return _read_index(folder / INDEX, faults)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        raise JobError(
            f"the weights in {folder} are pickles ({pickles[0].name}), which can run code; "
            f"convert them to safetensors"
        )
    others = sorted(folder.glob("*.safetensors"))
    if others:
        raise JobError(
            f"{folder} holds {others[0].name} but neither {SINGLE} nor {INDEX}; add the index or "
            f"rename it"
        )
    raise JobError(
        f"{folder} has no weights: neither {SINGLE} nor {INDEX}; {AGAIN}, or set "
        f"model.load_format to dummy for random weights"
    )


def _read_index(path: Path, faults: list[str]) -> dict[Path, list[str] | None]:
    try:
        data = path.read_bytes()
        raw = json.loads(data)
    except OSError as error:
        raise JobError(f"{path} cannot be read ({error.strerror}); {AGAIN}") from error
    except (ValueError, RecursionError) as error:
        refuse_pointer(path, data)
        raise JobError(f"{path} is not JSON; {AGAIN}") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise JobError(
            f"{path} is no index of safetensors files: it has no map weight_map from tensors to "
            f"files; {AGAIN}"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise JobError(f"{path}: weight_map gives {name} no file name; {AGAIN}")
    pairs = list(weight_map.items())
    by_file: dict[Path, list[str] | None] = {}
    names: dict[str, list[str]] = {}
    missing: list[str] = []
    for name, file in pairs:
        names.setdefault(file, []).append(name)
    for file, expected in sorted(names.items()):
        if Path(file).name != file:
            faults.append(f'{path.name} names "{file}", which is not in the folder')
        elif (path.parent / file).is_dir():
            faults.append(f"{file} is a folder where a file should be")
        elif not (path.parent / file).is_file():
            missing.append(f"{file} is missing ({counted(len(expected), 'tensor')})")
        else:
            by_file[path.parent / file] = expected
    faults += bounded(missing, "missing")
    return by_file


def _read_header(path: Path, faults: list[str]) -> dict[str, Entry] | None:
    """The tensors of one file, or None; what is wrong with it goes to `faults`."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            header_bytes = int.from_bytes(start, "little")
            if LFS_POINTER.startswith(start) and len(start) == LENGTH_BYTES:
                faults.append(f"{path.name} is a git-LFS pointer, not the weights themselves")
                return None
            if file_bytes < LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES:
                faults.append(f"{path.name} is not a safetensors file")
                return None
            raw = file.read(header_bytes)
    except OSError as error:
        faults.append(f"{path.name} cannot be read ({error.strerror})")
        return None
    if len(raw) < header_bytes:
        faults.append(f"{path.name} ends inside its header ({counted(file_bytes, 'byte')})")
        return None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        faults.append(f"{path.name} has a broken header: it is no JSON object")
        return None
    entries, last = {}, 0
    for name, info in header.items():
        if name == "__metadata__":
            continue
        found = _read_entry(path, info)
        if found is None:
            faults.append(f"{path.name} has a broken header: {name} has no dtype, shape and place")
            return None
        entries[name], begin, end = found
        entry_bytes = math.prod(entries[name].shape) * DTYPE_BYTES[entries[name].dtype]
        if end - begin != entry_bytes:
            faults.append(f"{path.name}: {name} has {end - begin} bytes, not those of its shape")
        last = max(last, end)
    needed_bytes = LENGTH_BYTES + header_bytes + last
    if file_bytes < needed_bytes:
        faults.append(f"{path.name} is cut off: {file_bytes} bytes of {needed_bytes}")
    return entries


def _read_entry(path: Path, info: Any) -> tuple[Entry, int, int] | None:
    """A tensor and where its bytes begin and end; None: the header does not say."""
    if not isinstance(info, dict) or str(info.get("dtype")) not in DTYPE_BYTES:
        return None
    shape, place = info.get("shape"), info.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(place) or len(place) != 2:
        return None
    return Entry(path, info["dtype"], tuple(shape)), place[0], place[1]


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )
