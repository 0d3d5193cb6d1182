"""Which objects of a store an input path means: one, those below a prefix, those of a glob."""

import fnmatch
import glob
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from batchmla.errors import JobError
from batchmla.jobs.remote import ObjectFacts, RemotePath
from batchmla.jobs.remote_calls import call, filesystem, scheme_of

_ALIASES = {"s3a": "s3", "gcs": "gs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What an entry of `input.path` stands for. `root`: what names of files start below."""

    root: str
    objects: tuple[ObjectFacts, ...]  # in reading order
    is_one: bool  # the entry is the object's own name


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Turns a store's final fault about an input into a sentence."""
    try:
        yield
    except OSError as error:
        words = error.strerror or str(error)
        raise JobError(f"input.path {url} cannot be read: {words}") from error


def object_facts(url: str) -> ObjectFacts:
    """What a store says of one object, which has to be there."""
    with reading(url):
        facts = RemotePath(url).facts()
    if facts is None:
        raise JobError(f"input file {url} is gone: no object has that name")
    return facts


def list_objects(entry: str) -> Listing:
    """Objects of a prefix or glob are sorted by their paths; hidden folders are left out."""
    with reading(entry):
        if glob.has_magic(entry):
            root = _fixed_part(entry)
            return Listing(root=root, objects=tuple(_globbed(entry)), is_one=False)
        facts = None if entry.endswith("/") else RemotePath(entry).facts()
        if facts is not None:
            return Listing(root=posixpath.dirname(entry), objects=(facts,), is_one=True)
        found = tuple(_below(entry))
    if not found:
        raise JobError(f"input.path {entry} does not exist: no object has that name or prefix")
    return Listing(root=entry.rstrip("/"), objects=found, is_one=False)


def _globbed(entry: str) -> Iterator[ObjectFacts]:
    system = filesystem(entry)
    listed: Mapping[str, Any] = call(entry, lambda: system.glob(entry, detail=True))
    for name in sorted(listed, key=_parts):
        url = _url(entry, name)
        if "/." in name and "/." not in entry:
            continue  # as in a shell, a pattern does not mean hidden names
        if listed[name]["type"] != "directory":
            yield ObjectFacts.of(url, listed[name])
        elif "**" not in entry:
            yield from _below(url)


def _below(prefix: str) -> Iterator[ObjectFacts]:
    system = filesystem(prefix)
    try:
        listed: Mapping[str, Any] = call(prefix, lambda: system.find(prefix, detail=True))
    except FileNotFoundError as error:
        if error.strerror == "there is no such bucket":
            raise
        return
    above = len(_parts(system._strip_protocol(prefix)))
    for name in sorted(listed, key=_parts):
        is_hidden = any(part.startswith((".", "_")) for part in _parts(name)[above:-1])
        if not is_hidden and not name.endswith("/"):
            yield ObjectFacts.of(_url(prefix, name), listed[name])


def object_names(urls: Sequence[str], roots: Sequence[str]) -> dict[str, str]:
    """The name of each object below what `roots` have in common; its URL if they lie apart."""
    places = [posixpath.join(*_parts(root)) for root in roots]
    if len({scheme_of(root) for root in roots}) != 1:
        return {url: url for url in urls}
    top = posixpath.commonpath(places)
    return {url: posixpath.relpath(posixpath.join(*_parts(url)), top or ".") for url in urls}


def reads_object(entry: str, part: str) -> bool:
    """Whether `entry` would find the object `part` of a job's output."""
    schemes = [_ALIASES.get(scheme_of(url), scheme_of(url)) for url in (entry, part)]
    if schemes[0] != schemes[1]:
        return False
    names, pattern = _parts(part), _parts(entry)
    ends = range(len(pattern), len(names) + (glob.has_magic(entry) or names == pattern))
    return any(
        _matches(names[:end], pattern)
        and not any(name.startswith((".", "_")) for name in names[end:])
        for end in ends
    )


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path fit the parts of a glob; `**` stands for any number of them."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] != "**":
        return fnmatch.fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])
    return _matches(names, pattern[1:]) or _matches(names[1:], pattern)


def _fixed_part(entry: str) -> str:
    """The prefix above the first part of a glob that is no plain name."""
    scheme, _, rest = entry.partition("://")
    parts = rest.split("/")
    plain = parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))]
    if not plain:
        raise JobError(f"input.path {entry}: name the bucket without a pattern")
    return f"{scheme}://{'/'.join(plain)}"


def _parts(path: str) -> list[str]:
    """The names in a URL without its scheme."""
    return [part for part in path.rpartition("://")[2].split("/") if part]


def _url(like: str, name: str) -> str:
    return f"{scheme_of(like)}://{name.lstrip('/')}"
