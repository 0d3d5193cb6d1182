"""Which files an input path means: files, globs, folders and data sets as a list in reading order.

It opens files for a few bytes only and knows nothing of rows.
"""

import fnmatch
import glob
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchmla.errors import JobError
from batchmla.jobs.dataset_files import (
    SCHEME,
    cached_shards,
    is_saved,
    is_streamed,
    saved_shards,
    streamed_files,
)
from batchmla.jobs.file_kind import (
    KIND_WORDS,
    checked_file,
    checked_object,
    is_wanted,
    kind_words,
)
from batchmla.jobs.input_file import InputFile
from batchmla.jobs.remote import ObjectFacts, local_text
from batchmla.jobs.remote_calls import is_url
from batchmla.jobs.remote_input import list_objects, object_facts, object_names, reads_object
from batchmla.jobs.settings import InputSettings
from batchmla.jobs.wording import nearest

logger = logging.getLogger(__name__)

_MOST_CALLS = 16  # to a store at a time


def find_files(
    settings: InputSettings, output: str | None = None, part: str = "part-00000.parquet"
) -> tuple[InputFile, ...]:
    """The files of `input.path`: entries in the order given, files of a folder or glob sorted.

    An `output` folder whose parts, of names such as `part`, would be read as input is refused.
    """
    wanted = settings.format
    listed: dict[str, str] = {}  # real path -> path as shown
    roots: list[str] = []
    again: list[str] = []
    shards: set[str] = set()
    objects: dict[str, ObjectFacts] = {}  # by URL, of those in a store
    output = None if output is None else local_text(output)
    for entry in map(local_text, settings.paths):
        if output is not None and _reads(entry, wanted, os.path.join(output, part)):
            raise JobError(
                f"output.path {output} lies within input.path {entry}: the job would read its own "
                "output; choose a folder outside it"
            )
        if _is_dataset(entry, wanted):
            root, found = _shards(entry, objects)
            shards.update(path for path in found if path not in objects)
        elif is_url(entry):
            root, found = _expand_url(entry, wanted, objects)
        else:
            root, found = _expand(entry, wanted)
        roots.append(root if is_url(root) else os.path.abspath(root))
        again.extend(p for p in found if listed.setdefault(_real_path(p), p) != p)
    if again:
        more = f" and {len(again) - 1} others" if len(again) > 1 else ""
        logger.warning("input file %s%s: named twice, read once", again[0], more)
    files = _checked(list(listed.values()), roots, objects, shards, wanted)
    kinds = {file.format: file.path for file in files}
    if len(kinds) > 1:
        mixed = " and ".join(f"{KIND_WORDS[kind]} ({kinds[kind]})" for kind in sorted(kinds)[::-1])
        raise JobError(f"input.path mixes {mixed}; name one kind with a glob or set input.format")
    return files


def _checked(
    paths: Sequence[str],
    roots: Sequence[str],
    objects: Mapping[str, ObjectFacts],
    shards: Collection[str],
    wanted: str,
) -> tuple[InputFile, ...]:
    """The facts of every file, looked at; many objects at a time, as each takes a while."""
    local = [root for root in roots if not is_url(root)]
    top = os.path.commonpath(local) if local else ""
    names = {url: url for url in objects}
    if objects and not local:
        names = object_names(list(objects), roots)

    def checked(path: str) -> InputFile:
        if path in objects:
            kind = "parquet" if wanted == "dataset" else wanted
            return checked_object(objects[path], names[path], kind)
        return checked_file(path, top, "dataset" if path in shards else wanted)

    if not objects:
        return tuple(map(checked, paths))
    with ThreadPoolExecutor(_MOST_CALLS) as pool:
        return tuple(pool.map(checked, paths))


def _expand_url(entry: str, wanted: str, objects: dict[str, ObjectFacts]) -> tuple[str, list[str]]:
    """The root and the URLs of an entry in a store; what it says of them goes into `objects`."""
    listing = list_objects(entry)
    found = [facts.url for facts in listing.objects]
    if not listing.is_one:
        is_given = glob.has_magic(entry) and wanted != "auto"
        found = _plain_names(found) if is_given else _only_data(found, entry, wanted)
    if not found:
        raise JobError(f"input.path {entry} holds no {kind_words(wanted)} file")
    objects.update({facts.url: facts for facts in listing.objects if facts.url in set(found)})
    return listing.root, found


def _plain_names(paths: list[str]) -> list[str]:
    return [path for path in paths if not _has_stray([os.path.basename(path)])]


def _real_path(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)


def _is_dataset(entry: str, wanted: str) -> bool:
    """Whether an entry is a data set; refuses what is asked to be one and is not."""
    is_one = entry.startswith(SCHEME) or (os.path.isdir(entry) and is_saved(entry))
    if is_one and wanted not in ("auto", "dataset"):
        raise JobError(
            f"input.path {entry} is a data set, not {kind_words(wanted)}; set input.format: dataset"
        )
    if wanted == "dataset" and not is_one:
        raise JobError(
            f"input.path {entry} is no data set; name a folder that save_to_disk() wrote, or an id "
            "as hf://NAMESPACE/NAME"
        )
    return is_one


def _shards(entry: str, objects: dict[str, ObjectFacts]) -> tuple[str, list[str]]:
    """The root and the files of a data set; what a hub says of them goes into `objects`."""
    if entry.startswith(SCHEME) and is_streamed(entry):
        root, found = streamed_files(entry)
        objects.update({url: object_facts(url) for url in found})
        return root, found
    if not entry.startswith(SCHEME):
        return entry, saved_shards(entry)
    found = cached_shards(entry)
    if not found:
        raise JobError(f"input.path {entry} has no rows in files; save it with save_to_disk()")
    return os.path.dirname(found[0]), found


def _reads(entry: str, wanted: str, part: str) -> bool:
    """Whether `entry` would find the file `part` of a job's output."""
    is_prefix = is_url(entry) and not glob.has_magic(entry)
    is_folder = is_prefix or os.path.isdir(entry)
    takes_all = wanted != "auto" and not is_folder  # a glob with a given format
    if not takes_all and not is_wanted(os.path.basename(part), wanted):
        return False
    if is_url(entry) or is_url(part):
        return is_url(entry) and is_url(part) and reads_object(entry, part)
    part = os.path.join(os.path.realpath(os.path.dirname(part)), os.path.basename(part))
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
    found = _only_data(found, entry) if wanted == "auto" else _plain_names(found)
    if not found:
        raise JobError(
            f"input.path {entry} matches no {kind_words(wanted)} file{_near_path(entry)}"
        )
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
            f"input folder {folder} holds no {kind_words(wanted)} file"
            + (f" (it holds {shown}{', ...' if len(paths) > 3 else ''})" if shown else "")
        )
    return found


def _only_data(paths: list[str], where: str, wanted: str = "auto") -> list[str]:
    """Of `paths` those whose ending is of the wanted kind; the others are counted in the log."""
    found: list[str] = []
    ignored: list[str] = []
    for path in paths:
        (found if is_wanted(os.path.basename(path), wanted) else ignored).append(path)
    if ignored:
        logger.info(
            "%s: %d files ignored, no %s by name: %s",
            where,
            len(ignored),
            kind_words(wanted),
            ", ".join(os.path.basename(path) for path in ignored[:5]),
        )
    return found


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
