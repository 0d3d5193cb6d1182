"""Safetensors files opened by their headers; tensors are read later, by slices, memory-mapped."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from batchmla.weights.faults import AGAIN, Faults
from batchmla.weights.header import Entry, parse_header, read_start
from batchmla.weights.shards import find_shards

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
READERS = 8  # threads: a folder on a network answers late


class Checkpoint:
    """The tensors of a folder by name. Files are mapped when first read and kept until `close`."""

    def __init__(
        self,
        folder: Path,
        entries: Mapping[str, Entry],
        lost: frozenset[str] = frozenset(),
        damaged: frozenset[Path] = frozenset(),
    ) -> None:
        """`lost`: tensors of files that are not there or whose header cannot be read; `damaged`:
        files that are not what their headers say."""
        self.folder = folder
        self.entries = entries
        self.lost = lost
        self.damaged = damaged
        self.read_bytes = 0  # of tensors and parts of them, so far
        self._open: dict[Path, Any] = {}
        self._in_file: Mapping[str, str] = {}  # what files call tensors that have another name here

    @staticmethod
    def open(folder: Path) -> "Checkpoint":
        """Reads headers only; every fault of every file is in one `JobError`."""
        faults = Faults(folder)
        found = Checkpoint.survey(folder, faults)
        faults.refuse()
        return found

    @staticmethod
    def survey(folder: Path, faults: Faults) -> "Checkpoint":
        """The same with the faults added to `faults`; what can be told of the tensors is there."""
        shards = find_shards(folder, faults)
        entries: dict[str, Entry] = {}
        lost = set(shards.lost)
        lacking, twice = list[str](), list[str]()
        with ThreadPoolExecutor(READERS) as pool:
            starts = list(pool.map(read_start, shards.files))
        headers = list(map(parse_header, starts))
        for (path, names), header in zip(shards.files.items(), headers, strict=True):
            faults.take(header.faults)
            if header.entries is None:
                lost.update(names or ())
                continue
            absent = [name for name in names or () if name not in header.entries]
            lost.update(absent)
            lacking += [f"{path.name} lacks {name}" for name in absent]
            twice += [
                f"{name} is in {entries[name].file.name} and in {path.name}"
                for name in header.entries.keys() & entries.keys()
            ]
            entries |= header.entries
        faults.add("missing in their files", lacking, AGAIN)
        faults.add("in two files", sorted(twice), AGAIN)
        damaged = [
            path for path, header in zip(shards.files, headers, strict=True) if header.faults
        ]
        return Checkpoint(folder, entries, frozenset(lost.difference(entries)), frozenset(damaged))

    def named(self, names: Mapping[str, str]) -> "Checkpoint":
        """The same tensors by other names: those in the files → those to be used."""
        made = Checkpoint(
            self.folder,
            {names.get(name, name): entry for name, entry in self.entries.items()},
            frozenset(names.get(name, name) for name in self.lost),
            self.damaged,
        )
        made._in_file = {new: old for old, new in names.items()}
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(entry.nbytes for entry in self.entries.values())

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A slice of one tensor, in the checkpoint's dtype; only its bytes are touched."""
        entry, name = self.entries[name], self._in_file.get(name, name)
        if entry.file not in self._open:
            self._open[entry.file] = safe_open(entry.file, framework="pt")
        if not slices:
            part: torch.Tensor = self._open[entry.file].get_tensor(name)
        else:
            part = self._open[entry.file].get_slice(name)[slices]
        self.read_bytes += part.nbytes
        return part

    def release(self, file: Path) -> None:
        """Unmaps one file; a later read maps it again."""
        self._open.pop(file, None)

    def close(self) -> None:
        """Unmaps the files."""
        self._open.clear()
