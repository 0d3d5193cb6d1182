"""Which files of a folder hold its weights: those of an index, one file, or numbered shards."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmla.errors import JobError
from batchmla.weights.faults import AGAIN, Faults, counted
from batchmla.weights.folder import refuse_pointer
from batchmla.weights.foreign import foreign_files, refuse_foreign

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARDS = 100_000
NAMED = 3  # of a missing file's tensors
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<at>\d+)-of-(?P<count>\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Shards:
    """The files that are there, each with the tensors its index expects in it (None: no index),
    and the tensors of files that are not there."""

    files: Mapping[Path, list[str] | None]
    lost: frozenset[str] = frozenset()


def has_weights(folder: Path) -> bool:
    """Whether any file of weights is there, whole or not, of this format or another.

    An index alone, which a download of small files brings along, is none.
    """
    return any(folder.glob("*.safetensors")) or bool(foreign_files(folder))


def find_shards(folder: Path, faults: Faults) -> Shards:
    """What is missing goes to `faults`; raises a `JobError` for a folder without an index, a file
    or shards of this format."""
    for name in (INDEX, SINGLE):
        if (folder / name).is_dir():
            raise JobError(f"{folder / name} is a folder where a file should be; {AGAIN}")
    if (folder / INDEX).is_file():
        return _of_index(folder / INDEX, faults)
    if (folder / SINGLE).is_file():
        return Shards({folder / SINGLE: None})
    others = sorted(folder.glob("*.safetensors"))
    numbered = [match for path in others if (match := NUMBERED.fullmatch(path.name))]
    if numbered:
        return _of_numbers(folder, numbered, faults)
    refuse_foreign(folder)
    if others:
        raise JobError(
            f"{folder} holds {others[0].name} but neither {SINGLE} nor {INDEX}; add the index or "
            f"rename it"
        )
    raise JobError(
        f"{folder} has no weights: neither {SINGLE} nor {INDEX}; {AGAIN}, or set "
        f"model.load_format to dummy for random weights"
    )


def _of_numbers(folder: Path, numbered: list[re.Match[str]], faults: Faults) -> Shards:
    """Shards without an index: their names say how many there must be."""
    sets = {(match["stem"], match["count"]) for match in numbered}
    if len(sets) > 1:
        named = " and ".join(f"{stem}-…-of-{count}" for stem, count in sorted(sets)[:NAMED])
        raise JobError(f"{folder} holds shards of several sets ({named}) and no {INDEX}; {AGAIN}")
    ((stem, count),) = sets
    if int(count) > MAX_SHARDS:
        raise JobError(f"{folder}: {numbered[0].string} counts {int(count):,} shards; {AGAIN}")
    width = len(numbered[0]["at"])
    wanted = [f"{stem}-{at:0{width}}-of-{count}.safetensors" for at in range(1, int(count) + 1)]
    there = {match.string for match in numbered}
    faults.add(
        "missing",
        [f"{name} is missing" for name in wanted if name not in there],
        AGAIN,
    )
    faults.add(
        "outside that count",
        [f"{name} is none of {count} shards" for name in sorted(there.difference(wanted))],
        AGAIN,
    )
    return Shards({folder / name: None for name in wanted if name in there})


def _of_index(path: Path, faults: Faults) -> Shards:
    by_file: dict[str, list[str]] = {}
    for name, file in _read_index(path).items():
        by_file.setdefault(file, []).append(name)
    files: dict[Path, list[str] | None] = {}
    lost: set[str] = set()
    missing, unusable = list[str](), list[str]()
    for file, names in sorted(by_file.items()):
        if Path(file).name != file:
            unusable.append(f'{path.name} names "{file}", which is not in the folder')
        elif (path.parent / file).is_dir():
            unusable.append(f"{file} is a folder where a file should be")
        elif not (path.parent / file).is_file():
            missing.append(f"{file} is missing ({_listed(names)})")
        else:
            files[path.parent / file] = names
            continue
        lost.update(names)
    faults.add("missing", missing, AGAIN)
    faults.add("unusable", unusable, AGAIN)
    return Shards(files, frozenset(lost))


def _listed(names: list[str]) -> str:
    """Like "5 tensors: a, b, c, …"."""
    more = ", …" if len(names) > NAMED else ""
    return f"{counted(len(names), 'tensor')}: {', '.join(names[:NAMED])}{more}"


def _read_index(path: Path) -> dict[str, str]:
    """Tensor → file."""
    try:
        data = path.read_bytes()
        raw: Any = json.loads(data)
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
    return weight_map
