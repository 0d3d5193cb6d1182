"""Ready-made job files: listed with one line each, written where asked, never over a file."""

from importlib.resources import files
from pathlib import Path

from batchmla.errors import JobError, StorageError
from batchmla.jobs.wording import nearest


def list_recipes() -> dict[str, str]:
    """Recipe name -> its first comment line, sorted."""
    found = {
        entry.name.removesuffix(".yaml"): _first_line(entry.read_text("utf-8"))
        for entry in files("batchmla.jobs.recipes").iterdir()
        if entry.name.endswith(".yaml")
    }
    return dict(sorted(found.items()))


def _first_line(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ").rstrip()


def read_recipe(name: str) -> str:
    """The text of a recipe."""
    known = list_recipes()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
        raise JobError(f"there is no recipe {name}; {hint}")
    return (files("batchmla.jobs.recipes") / f"{name}.yaml").read_text("utf-8")


def write_recipe(name: str, path: Path | None = None) -> Path:
    """Write a recipe to `path` (default: NAME.yaml here); an existing file is left alone."""
    text = read_recipe(name)
    target = path if path is not None else Path(f"{name}.yaml")
    try:
        with target.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise JobError(f"{target} exists and is left as it is; name another file") from None
    except FileNotFoundError:
        raise JobError(f"there is no folder {target.parent} to write {target.name} into") from None
    except OSError as fault:
        raise StorageError(f"{target} cannot be written: {fault.strerror}") from None
    return target
