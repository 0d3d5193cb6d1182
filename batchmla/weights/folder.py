"""Where a model lies: a folder, a model of this package, or the local Hugging Face cache."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from batchmla.errors import JobError
from batchmla.weights.foreign import FORMATS, refuse_foreign, told_of

BUILTIN = "builtin:"
LFS_POINTER = b"version https://git-lfs"


def refuse_pointer(path: Path, data: bytes) -> None:
    """A `JobError` if `data`, the content of `path`, only says where git-LFS has the file."""
    if data.startswith(LFS_POINTER):
        raise JobError(
            f"{path} is a git-LFS pointer, not the file itself; run git lfs pull in that folder"
        )


def find_model(path: str, revision: str = "main") -> Path:
    """The folder with `config.json`; nothing is downloaded."""
    if path.startswith(BUILTIN):
        folder = _find_builtin(path.removeprefix(BUILTIN))
    elif (local := _look_for(path)) is not None:
        folder = local
    elif path.count("/") == 1 and not path.startswith((".", "/", "~")):
        folder = _find_cached(path, revision)
    else:
        raise JobError(f"model.path {path} does not exist; give a folder with config.json")
    if not (folder / "config.json").is_file():
        if not any(folder.glob("*.safetensors")):
            refuse_foreign(folder)
        raise JobError(
            f"model.path {path}: {folder} has no file config.json; give the folder of a model in "
            f"Hugging Face's format"
        )
    return folder


def _look_for(path: str) -> Path | None:
    """The local folder of that path; None: there is none."""
    try:
        found = Path(path).expanduser()
        if found.is_file() and found.suffix in FORMATS:
            raise JobError(f"model.path {path}: these are {told_of(found)}")
        if found.is_file():
            raise JobError(f"model.path {path} is a file; give the folder with config.json")
        return found if found.is_dir() else None
    except (OSError, RuntimeError) as error:  # too long, no access, or an unknown ~user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise JobError(
            f"model.path {path:.80} cannot be used ({reason}); give a folder with config.json"
        ) from error


def _find_builtin(name: str) -> Path:
    root = Path(str(files("batchmla.builtin")))
    known = sorted(child.parent.name for child in root.glob("*/config.json"))
    if name not in known:
        listed = ", ".join(BUILTIN + each for each in known) or "none in this installation"
        raise JobError(f"model.path {BUILTIN}{name} is no model of this package; known: {listed}")
    return root / name


def _find_cached(path: str, revision: str) -> Path:
    """A snapshot that an earlier download left, complete or not; the checkpoint checks the rest."""
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except ValueError:  # no name that the hub allows
        found = None
    if not isinstance(found, str):
        raise JobError(
            f"model.path {path} is neither a folder here nor, at revision {revision}, in the "
            f"Hugging Face cache {constants.HF_HUB_CACHE}; download it first (hf download {path})"
        )
    return Path(found).parent


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`."""
    path = folder / "config.json"
    try:
        data = path.read_bytes()
        raw = json.loads(data)
    except OSError as error:
        raise JobError(f"{path} cannot be read ({error.strerror}); give a model folder") from error
    except (ValueError, RecursionError) as error:
        refuse_pointer(path, data)
        raise JobError(f"{path} is not JSON ({error}); copy it again from the model") from error
    if not isinstance(raw, dict):
        raise JobError(f"{path} holds no JSON object; copy it again from the model")
    return raw
