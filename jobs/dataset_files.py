"""Hugging Face data sets as lists of files: folders of save_to_disk, ids in the local cache, splits
of a hub that are read where they lie.

A saved folder is read without the package `datasets`; an id needs it. With `streaming` a split
is the Parquet files that it consists of, at the commit that its revision means now: files have
rows in an order, a size and a hash, so that a run that goes on reads what the first one read.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from batchmla.errors import JobError
from batchmla.jobs.remote_calls import PINNED

SCHEME = "hf://"
_FORM = "hf://NAMESPACE/NAME[@REVISION][?config=CONFIG&split=SPLIT&streaming=true]"


def is_saved(folder: str) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    path = Path(folder)
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def saved_shards(folder: str) -> list[str]:
    """The Arrow files of a saved data set, in its order."""
    named = _json(os.path.join(folder, "dataset_dict.json"))
    if named is not None:
        splits = named.get("splits", [])
        if len(splits) != 1:
            first = os.path.join(folder, splits[0]) if splits else folder
            raise JobError(
                f"input.path {folder} holds the splits {', '.join(splits) or 'none'}; name one, "
                f"such as {first}"
            )
        return saved_shards(os.path.join(folder, splits[0]))
    state = _json(os.path.join(folder, "state.json")) or {}
    if state.get("_indices_data_files"):
        raise JobError(
            f"input.path {folder} keeps an order of its own beside the rows; call "
            "flatten_indices() before save_to_disk()"
        )
    names = [each["filename"] for each in state.get("_data_files", [])]
    if not names:
        raise JobError(f"input.path {folder}: its state.json names no data files; save it again")
    return [os.path.join(folder, name) for name in names]


def _json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as fault:
        raise JobError(f"input file {path} cannot be read: {fault}") from None
    return found if isinstance(found, dict) else {}


def is_streamed(url: str) -> bool:
    """Whether the address of a data set asks for it to be read where it lies."""
    return _parsed(url)[2].get("streaming") == "true"


def streamed_files(url: str) -> tuple[str, list[str]]:
    """Where the files of a split lie in the hub, and their addresses, each with the commit."""
    name, revision, options = _parsed(url)
    with _loading(url):
        builder: Any = _library(url).load_dataset_builder(
            name, options.get("config"), revision=revision
        )
    splits = builder.config.data_files or {}
    files = [str(each) for each in _one_split(url, splits, options.get("split"))]
    other = next((each for each in files if not each.endswith(".parquet")), None)
    if other is not None:
        raise JobError(
            f"input.path {url}: only Parquet is read from a hub, and {other} is none; leave "
            "streaming out, to have the data set loaded first"
        )
    roots = {found[0] for found in map(PINNED.match, files) if found is not None}
    if len(roots) != 1:
        raise JobError(
            f"input.path {url}: its files do not all lie in its own repository; leave streaming "
            "out, to have the data set loaded first"
        )
    return roots.pop().rstrip("/"), files


def cached_shards(url: str) -> list[str]:
    """The Arrow files of the data set with an id; `datasets` finds or fetches it."""
    name, revision, options = _parsed(url)
    with _loading(url):
        found: Any = _library(url).load_dataset(
            name, options.get("config"), split=options.get("split"), revision=revision
        )
    if isinstance(found, dict):
        found = _one_split(url, found, None)
    return [each["filename"] for each in found.cache_files]


def _one_split(url: str, splits: Mapping[str, Any], named: str | None) -> Any:
    """The split that is named, or the only one."""
    if named is not None and named not in splits:
        raise JobError(
            f"input.path {url} has no split {named}; it has {', '.join(splits) or 'none'}"
        )
    if named is None and len(splits) != 1:
        raise JobError(
            f"input.path {url} has the splits {', '.join(splits)}; name one with ?split="
        )
    return splits[named or next(iter(splits))]


def _library(url: str) -> Any:
    try:
        import datasets  # late: an extra
    except ImportError:
        raise JobError(
            f"input.path {url} needs the package datasets; install batchmla[datasets]"
        ) from None
    return datasets


@contextmanager
def _loading(url: str) -> Iterator[None]:
    """Turns what the library refuses into a sentence."""
    try:
        yield
    except (OSError, ValueError) as fault:  # what its errors derive from
        reason = " ".join(str(fault).split())[:300]
        raise JobError(f"input.path {url} cannot be loaded: {reason}") from None


def _parsed(url: str) -> tuple[str, str | None, dict[str, str]]:
    """Id, revision and options of an address."""
    parts = urlsplit(url)
    path, _, revision = f"{parts.netloc}{parts.path}".partition("@")
    names = [name for name in path.split("/") if name]
    if names[:1] == ["datasets"] and len(names) > 1:
        names.pop(0)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - {"config", "split", "streaming"})
    if options.get("streaming", "true") not in ("true", "false"):
        raise JobError(f"input.path {url}: streaming is true or false")
    if not 1 <= len(names) <= 2 or "/" in revision or unknown:
        what = f"the option {unknown[0]} is not known" if unknown else "this is no id of a data set"
        raise JobError(f"input.path {url}: {what}; write it as {_FORM}")
    return "/".join(names), revision or None, options
