"""Hugging Face data sets as lists of Arrow files: folders of save_to_disk, ids in the local cache.

A saved folder is read without the package `datasets`; an id needs it.
"""

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from batchmla.errors import JobError

SCHEME = "hf://"
_FORM = "hf://NAMESPACE/NAME[@REVISION][?config=CONFIG&split=SPLIT]"


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


def cached_shards(url: str) -> list[str]:
    """The Arrow files of the data set with an id; `datasets` finds or fetches it."""
    name, revision, options = _parsed(url)
    try:
        import datasets  # late: an extra
    except ImportError:
        raise JobError(
            f"input.path {url} needs the package datasets; install batchmla[datasets]"
        ) from None
    try:
        found: Any = datasets.load_dataset(
            name, options.get("config"), split=options.get("split"), revision=revision
        )
    except (OSError, ValueError) as fault:  # what its errors derive from
        reason = " ".join(str(fault).split())[:300]
        raise JobError(f"input.path {url} cannot be loaded: {reason}") from None
    if isinstance(found, dict):
        if len(found) != 1:
            raise JobError(
                f"input.path {url} has the splits {', '.join(found)}; name one with ?split="
            )
        found = next(iter(found.values()))
    return [each["filename"] for each in found.cache_files]


def _parsed(url: str) -> tuple[str, str | None, dict[str, str]]:
    """Id, revision and options of an address."""
    parts = urlsplit(url)
    path, _, revision = f"{parts.netloc}{parts.path}".partition("@")
    names = [name for name in path.split("/") if name]
    if names[:1] == ["datasets"] and len(names) > 1:
        names.pop(0)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - {"config", "split"})
    if not 1 <= len(names) <= 2 or "/" in revision or unknown:
        what = f"the option {unknown[0]} is not known" if unknown else "this is no id of a data set"
        raise JobError(f"input.path {url}: {what}; write it as {_FORM}")
    return "/".join(names), revision or None, options
