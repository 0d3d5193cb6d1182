"""Which files an input path means: files, globs and folders as a sorted list, each checked by its
first bytes. It opens files for a few bytes only and knows nothing of rows.
"""

import fnmatch
import glob
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchmla.errors import JobError
from batchmla.jobs.settings import InputSettings
from batchmla.jobs.wording import nearest

logger = logging.getLogger(__name__)

Format = Literal["parquet", "jsonl"]
Compression = Literal["none", "gzip", "zstd"]

_JSONL_ENDINGS = tuple(
    name + packed for name in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst")
)
_LATER_ENDINGS = (".csv", ".csv.gz", ".csv.zst", ".tsv", ".json", ".arrow", ".feather", ".orc")
_MAGIC = (
    (b"PAR1", "Parquet"),
    (b"PARE", "encrypted Parquet"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"\x89PNG", "a PNG image"),
    (b"%PDF", "PDF"),
    (b"ARROW1", "an Arrow file"),
    (b"ORC", "ORC"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file of the input. `num_rows` is None until a footer or a scan has counted them."""

    path: str  # as opened and as shown
    name: str  # below the input root, with "/" between folders: half of a row's identity
    format: Format
    compression: Compression = "none"
    size_bytes: int
    mtime_ns: int
    num_rows: int | None = None


def find_files(settings: InputSettings, output: str | None = None) -> tuple[InputFile, ...]:
    """The files of `input.path`: entries in the order given, files of a folder or glob sorted.

    An `output` folder whose parts would be read as input is refused.
    """
    wanted = settings.format
    listed: dict[str, str] = {}  # real path -> path as shown
    roots: list[str] = []
    again: list[str] = []
    for entry in settings.paths:
        if output is not None and _reads(entry, wanted, output):
            raise JobError(
                f"output.path {output} lies within input.path {entry}: the job would read its own "
                "output; choose a folder outside it"
            )
        root, found = _expand(entry, wanted)
        roots.append(os.path.abspath(root))
        again.extend(p for p in found if listed.setdefault(os.path.realpath(p), p) != p)
    if again:
        more = f" and {len(again) - 1} others" if len(again) > 1 else ""
        logger.warning("input file %s%s: named twice, read once", again[0], more)
    top = os.path.commonpath(roots)
    files = tuple(_checked(path, top, wanted) for path in listed.values())
    kinds = {file.format: file.path for file in files}
    if len(kinds) > 1:
        raise JobError(
            f"input.path mixes Parquet ({kinds['parquet']}) and JSONL ({kinds['jsonl']}); "
            "name one kind with a glob or set input.format"
        )
    return files


def _reads(entry: str, wanted: str, output: str) -> bool:
    """Whether `entry` would find the parts of a job that writes to the folder `output`."""
    if wanted not in ("auto", "parquet"):
        return False
    part = os.path.join(os.path.realpath(output), "part-00000.parquet")
    if os.path.isdir(entry):
        return _is_walked(entry, part)
    if os.path.lexists(entry) or not glob.has_magic(entry):
        return False
    names = Path(part).parts
    pattern = Path(os.path.realpath(_fixed_part(entry)), *_magic_part(entry)).parts
    if _matches(names, pattern):
        return True
    return "**" not in entry and any(
        _matches(names[:end], pattern) and not _has_stray(names[end:]) for end in range(len(names))
    )


def _is_walked(folder: str, path: str) -> bool:
    """Whether `path`, free of links, is among what a walk through `folder` lists."""
    below = os.path.relpath(path, os.path.realpath(folder)).split(os.sep)
    return below[0] != os.pardir and not _has_stray(below)


def _has_stray(names: Sequence[str]) -> bool:
    return any(name.startswith((".", "_")) for name in names)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path fit the parts of a glob; `**` stands for any number of them."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] != "**":
        return fnmatch.fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])
    return _matches(names, pattern[1:]) or _matches(names[1:], pattern)


def _magic_part(entry: str) -> tuple[str, ...]:
    """The parts of a glob from the first that is no plain name."""
    parts = Path(entry).parts
    return parts[next(i for i, part in enumerate(parts) if glob.has_magic(part)) :]


def _fixed_part(entry: str) -> str:
    """The folder above them."""
    parts = Path(entry).parts
    fixed = parts[: len(parts) - len(_magic_part(entry))]
    return os.path.join(*fixed) if fixed else "."


def _expand(entry: str, wanted: str) -> tuple[str, list[str]]:
    """The input root of one entry of `input.path`, and its files."""
    if os.path.isdir(entry):
        return entry, _folder_files(entry, wanted)
    if os.path.lexists(entry):
        return os.path.dirname(entry) or ".", [entry]
    if not glob.has_magic(entry):
        raise JobError(f"input.path {entry} does not exist{_near_path(entry)}")
    root = _fixed_part(entry)
    found: list[str] = []
    for path in sorted(glob.glob(entry, recursive=True)):
        if not os.path.isdir(path):
            found.append(path)
        elif "**" not in entry:
            found.extend(_folder_files(path, wanted, needs_some=False))
    if wanted == "auto":
        found = _only_data(found, entry)
    if not found:
        raise JobError(f"input.path {entry} matches no Parquet or JSONL file{_near_path(entry)}")
    return root, found


def _folder_files(folder: str, wanted: str, *, needs_some: bool = True) -> list[str]:
    def unreadable(fault: OSError) -> None:
        raise JobError(f"input folder {fault.filename} cannot be read: {fault.strerror}")

    paths: list[str] = []
    for above, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        paths.extend(os.path.join(above, name) for name in names)
    paths.sort(key=lambda path: os.path.relpath(path, folder).split(os.sep))
    found = _only_data(paths, folder, wanted)
    if not found and needs_some:
        shown = ", ".join(os.path.relpath(path, folder) for path in paths[:3])
        raise JobError(
            f"input folder {folder} holds no {_kind_words(wanted)} file"
            + (f" (it holds {shown}{', ...' if len(paths) > 3 else ''})" if shown else "")
        )
    return found


def _only_data(paths: list[str], where: str, wanted: str = "auto") -> list[str]:
    """Of `paths` those whose ending is of the wanted kind; the others are counted in the log."""
    found: list[str] = []
    ignored: list[str] = []
    for path in paths:
        name = os.path.basename(path)
        kind = format_by_name(name)
        is_data = kind is not None and wanted in ("auto", kind) and not name.startswith((".", "_"))
        (found if is_data else ignored).append(path)
    if ignored:
        logger.info(
            "%s: %d files ignored, no %s by name: %s",
            where,
            len(ignored),
            _kind_words(wanted),
            ", ".join(os.path.basename(path) for path in ignored[:5]),
        )
    return found


def format_by_name(name: str) -> Format | None:
    """The format a file's ending stands for, if any."""
    lower = name.lower()
    if lower.endswith(".parquet"):
        return "parquet"
    return "jsonl" if lower.endswith(_JSONL_ENDINGS) else None


def _kind_words(wanted: str) -> str:
    return {"parquet": "Parquet", "jsonl": "JSONL"}.get(wanted, "Parquet or JSONL")


def _near_path(entry: str) -> str:
    """A hint at what exists instead: the nearest neighbour, or the folder that is missing."""
    path = Path(entry)
    for part in path.parents:
        if not glob.has_magic(str(part)) and not part.is_dir() and part.parent.is_dir():
            near = nearest(part.name, _names_in(part.parent))
            hint = f"; did you mean {part.parent / near}?" if near else ""
            return f": there is no folder {part}{hint}"
    if not path.parent.is_dir():
        return ""
    near = nearest(path.name, _names_in(path.parent))
    return f"; did you mean {path.parent / near}?" if near else f" in the folder {path.parent}"


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _checked(path: str, root: str, wanted: str) -> InputFile:
    """The file's facts, or a JobError if it cannot be read or is not what its name says."""
    try:
        status = os.stat(path)
        if not os.path.isfile(path):
            raise JobError(f"input file {path} is not a regular file")
        with open(path, "rb") as stream:
            head = stream.read(1024)
            stream.seek(max(status.st_size - 4, 0))
            tail = stream.read(4)
    except OSError as fault:
        raise JobError(f"input file {path} cannot be read: {fault.strerror}") from None
    kind = _format_of(path, wanted, head)
    compression = _check_jsonl(path, head) if kind == "jsonl" else "none"
    if kind == "parquet":
        _check_parquet(path, head, tail)
    return InputFile(
        path=path,
        name=Path(os.path.relpath(os.path.abspath(path), root)).as_posix(),
        format=kind,
        compression=compression,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _format_of(path: str, wanted: str, head: bytes) -> Format:
    if wanted in ("parquet", "jsonl"):
        return "parquet" if wanted == "parquet" else "jsonl"
    by_name = format_by_name(os.path.basename(path))
    if by_name is not None:
        return by_name
    if head.startswith(b"PAR1"):
        return "parquet"
    ending = next((end for end in _LATER_ENDINGS if path.lower().endswith(end)), None)
    if ending is not None:
        raise JobError(
            f"input file {path}: reading {ending} files is not built yet; give Parquet or JSONL"
            + (
                ", or set input.format: jsonl if each line is an object"
                if ending == ".json"
                else ""
            )
        )
    raise JobError(f"input file {path}: its ending tells no format; set input.format")


def _content(head: bytes) -> str:
    if not head:
        return "nothing"
    for magic, words in _MAGIC:
        if head.startswith(magic):
            return words
    return "binary data" if b"\0" in head else "text"


def _check_parquet(path: str, head: bytes, tail: bytes) -> None:
    if not head.startswith(b"PAR1"):
        raise JobError(
            f"input file {path} is not Parquet: it holds {_content(head)}; "
            "name it by what it holds or set input.format"
        )
    if tail != b"PAR1":
        raise JobError(f"input file {path} is cut short: it has no Parquet footer; write it again")


def _check_jsonl(path: str, head: bytes) -> Compression:
    content = _content(head)
    claims: tuple[tuple[str, Compression], ...] = ((".gz", "gzip"), (".zst", "zstd"))
    for ending, compression in claims:
        if path.lower().endswith(ending) and content != compression:
            raise JobError(
                f"input file {path} is not {compression} data: it holds {content}; "
                "write it again or name it by what it holds"
            )
    if content == "gzip":
        return "gzip"
    if content == "zstd":
        return "zstd"
    if content not in ("text", "nothing"):
        raise JobError(
            f"input file {path} is not JSONL: it holds {content}; "
            "give UTF-8 text with one JSON object a line, or set input.format"
        )
    return "none"


def stat_file(file: InputFile) -> tuple[int, int]:
    """Its size in bytes and its modification time in nanoseconds, now."""
    try:
        status = os.stat(file.path)
    except OSError as fault:
        raise JobError(f"input file {file.path} is gone: {fault.strerror}") from None
    return status.st_size, status.st_mtime_ns


def check_unchanged(file: InputFile) -> None:
    """Refuse a file that is not the one that was opened first."""
    if stat_file(file) != (file.size_bytes, file.mtime_ns):
        raise JobError(f"input file {file.path} changed while the job ran; run the job again")


def read_blocks(file: InputFile, block_bytes: int = 1 << 20) -> Iterator[bytes]:
    """The file's bytes as stored, for a digest."""
    try:
        with open(file.path, "rb") as stream:
            while block := stream.read(block_bytes):
                yield block
    except OSError as fault:
        raise JobError(f"input file {file.path} cannot be read: {fault.strerror}") from None
