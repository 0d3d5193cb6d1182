"""Safetensors files opened by their headers; tensors are read later, by slices, memory-mapped."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from batchmla.errors import JobError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LENGTH_BYTES = 8
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

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        self.folder = folder
        self.entries = entries
        self._open: dict[Path, Any] = {}

    @staticmethod
    def open(folder: Path) -> "Checkpoint":
        """Reads headers only; every fault of every file is in one `JobError`."""
        faults: list[str] = []
        entries: dict[str, Entry] = {}
        for path, names in _find_files(folder, faults).items():
            found = _read_header(path, faults)
            faults += [f"{path.name} lacks {name}" for name in names or () if name not in found]
            for name, entry in found.items():
                if name in entries:
                    faults.append(f"{name} is in {entries[name].file.name} and in {path.name}")
                entries[name] = entry
        if faults:
            raise JobError(f"the weights in {folder} cannot be used: " + "; ".join(faults))
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


def _find_files(folder: Path, faults: list[str]) -> dict[Path, list[str] | None]:
    """Each file with the tensors the index expects in it; None: no index."""
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
    raise JobError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def _read_index(path: Path, faults: list[str]) -> dict[Path, list[str] | None]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(f"{path} is no index of safetensors files: {error!r}") from error
    by_file: dict[Path, list[str] | None] = {}
    names: dict[str, list[str]] = {}
    for name, file in pairs:
        names.setdefault(file, []).append(name)
    for file, expected in sorted(names.items()):
        if Path(file).name != file:
            faults.append(f"{path.name} names {file!r}, which is not in the folder")
        elif not (path.parent / file).is_file():
            faults.append(f"{file} is missing ({len(expected)} tensors)")
        else:
            by_file[path.parent / file] = expected
    return by_file


def _read_header(path: Path, faults: list[str]) -> dict[str, Entry]:
    """The tensors of one file; what is wrong with it goes to `faults`."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if file_bytes < LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES:
            faults.append(f"{path.name} is not a safetensors file")
            return {}
        raw = file.read(header_bytes)
    if len(raw) < header_bytes:
        faults.append(f"{path.name} ends inside its header ({file_bytes} bytes)")
        return {}
    try:
        header = json.loads(raw)
        entries, ends = {}, [0]
        for name, info in header.items():
            if name == "__metadata__":
                continue
            begin, end = info["data_offsets"]
            shape = tuple(int(length) for length in info["shape"])
            if end - begin != math.prod(shape) * DTYPE_BYTES[info["dtype"]] or begin < 0:
                faults.append(
                    f"{path.name}: {name} has {end - begin} bytes, not those of its shape"
                )
            entries[name] = Entry(path, info["dtype"], shape)
            ends.append(end)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        faults.append(f"{path.name} has a broken header ({error!r})")
        return {}
    needed_bytes = LENGTH_BYTES + header_bytes + max(ends)
    if file_bytes < needed_bytes:
        faults.append(f"{path.name} is cut off: {file_bytes} bytes of {needed_bytes}")
    return entries
