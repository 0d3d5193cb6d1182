"""Where a model lies: a folder, a model of this package, or the local Hugging Face cache."""

from importlib.resources import files
from pathlib import Path

from batchmla.errors import JobError

BUILTIN = "builtin:"


def find_model(path: str, revision: str = "main") -> Path:
    """The folder with `config.json`; nothing is downloaded."""
    if path.startswith(BUILTIN):
        folder = _find_builtin(path.removeprefix(BUILTIN))
    elif Path(path).expanduser().is_dir():
        folder = Path(path).expanduser()
    elif Path(path).expanduser().is_file():
        raise JobError(f"model.path {path} is a file; give the folder with config.json")
    elif path.count("/") == 1 and not path.startswith((".", "/", "~")):
        folder = _find_cached(path, revision)
    else:
        raise JobError(f"model.path {path} does not exist; give a folder with config.json")
    if not (folder / "config.json").is_file():
        raise JobError(f"model.path {path} has no config.json in {folder}")
    return folder


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

    found = try_to_load_from_cache(path, "config.json", revision=revision)
    if not isinstance(found, str):
        raise JobError(
            f"model.path {path} is neither a folder here nor, at revision {revision}, in the "
            f"Hugging Face cache {constants.HF_HUB_CACHE}; download it first (hf download {path})"
        )
    return Path(found).parent
