"""House rules that a reader relies on, checked by walking the source: floors, sizes, packaging."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 350

# floor of every module prefix, longest prefix first; a module may import its own floor and below
FLOORS = {
    "batchmla": 0,  # the package itself: docstring and version
    "batchmla.errors": 0,
    "batchmla.core": 0,
    "batchmla.kernels": 1,
    "batchmla.text": 1,
    "batchmla.kv": 2,
    "batchmla.placement": 0,
    "batchmla.parallel": 2,
    "batchmla.layers": 3,
    "batchmla.attention": 3,
    "batchmla.weights": 4,
    "batchmla.models": 4,
    "batchmla.engine": 5,
    "batchmla.jobs": 6,
    "batchmla.api": 7,
    "batchmla.cli": 7,
    "batchmla.bench": 7,
    "batchmla.__main__": 7,
    "batchmla.builtin": 0,
}

# third-party packages a floor may use; stdlib and own modules are free within the floor rule
THIRD_PARTY = {
    "batchmla.errors": set(),
    "batchmla.core": {"numpy"},
    "batchmla.placement": set(),
    "batchmla.kernels": {"torch", "triton", "numpy"},
    "batchmla.text": {"numpy", "transformers", "tokenizers", "jinja2", "llguidance"},
    "batchmla.kv": {"torch", "numpy"},
    "batchmla.parallel": {"torch"},
    "batchmla.layers": {"torch"},
    "batchmla.attention": {"torch", "numpy"},
    "batchmla.weights": {"torch", "safetensors", "numpy", "huggingface_hub"},
    "batchmla.models": {"torch", "safetensors", "numpy"},
    "batchmla.engine": {"torch", "numpy", "psutil"},
    "batchmla.jobs": {
        "numpy", "pyarrow", "ruamel", "pydantic", "pydantic_core", "fsspec", "jinja2", "rich",
        "psutil", "zstandard", "ray", "datasets", "matplotlib",
    },
    "batchmla.cli": {"typer", "click", "rich"},
}  # fmt: skip

# within a floor: who may not know whom
FORBIDDEN = {
    "batchmla.kernels": {"batchmla"},  # only batchmla.kernels.*
    "batchmla.text": {"batchmla.kv", "batchmla.kernels", "batchmla.parallel"},
    "batchmla.layers": {"batchmla.attention"},
    "batchmla.weights": {"batchmla.models"},
}


def module_files() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of the package."""
    for folder, prefix in (
        ("batchmla", "batchmla"),
        ("kernels", "batchmla.kernels"),
        ("jobs", "batchmla.jobs"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((prefix, *parts)).removesuffix(".__init__")
            yield name, path


def prefix_of(name: str, table: dict[str, object]) -> str | None:
    """The longest key of `table` that is `name` or a parent of it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        key = ".".join(parts[:end])
        if key in table:
            return key
    return None


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, type-checking blocks included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = dict(module_files())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_keeps_to_its_floor(name: str) -> None:
    own = prefix_of(name, FLOORS)
    allowed = THIRD_PARTY.get(prefix_of(name, THIRD_PARTY) or "")
    for imported in imports(MODULES[name]):
        top = imported.split(".")[0]
        if top == "batchmla":
            target = prefix_of(imported, FLOORS)
            assert FLOORS[target] <= FLOORS[own], f"{name} imports {imported}: a higher floor"
            for bad in FORBIDDEN.get(own, ()):
                inside = imported.startswith(own + ".") or imported == own
                assert inside or not (imported + ".").startswith(bad + "."), f"{name}: {imported}"
        elif top not in sys.stdlib_module_names and allowed is not None:
            assert top in allowed, f"{name} imports {imported}, which its floor may not use"


def test_no_family_imports_another() -> None:
    shared = {"base", "decoder", "hf", "load", "names"}
    families = {name for name in MODULES if name.startswith("batchmla.models.")} - {
        f"batchmla.models.{word}" for word in shared
    }
    for name in families:
        own_rooms = {other for other in families if other.startswith(f"{name}_")}
        whole = {other for other in families if name.startswith(f"{other}_")}
        siblings = {other for one in whole for other in families if other.startswith(f"{one}_")}
        others = families - {name} - own_rooms - siblings
        assert not others & set(imports(MODULES[name])), name


@pytest.mark.parametrize("name", sorted(MODULES))
def test_file_is_small_and_plain(name: str) -> None:
    text = MODULES[name].read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert "os.environ" not in text and "getenv" not in text, "no environment variables of ours"
    used = set(imports(MODULES[name]))
    if name != "batchmla.parallel":
        assert not any(module.startswith("torch.distributed") for module in used)
    if not name.startswith("batchmla.kernels.triton"):
        assert not any(module.split(".")[0] == "triton" for module in used)
    assert ast.get_docstring(ast.parse(text)), f"{name} has no module docstring"


def test_every_package_folder_is_listed() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert found == listed


@pytest.mark.parametrize("argument", ["import batchmla", "import batchmla.cli"])
def test_import_is_light(argument: str) -> None:
    heavy = ("torch", "triton", "pyarrow", "transformers", "pydantic", "numpy")
    code = f"import sys; {argument}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"


def test_help_lists_every_command() -> None:
    out = subprocess.run(
        [sys.executable, "-P", "-m", "batchmla", "--help"], capture_output=True, text=True
    )
    assert out.returncode == 0
    for command in ("run", "plan", "preview", "inspect", "status", "report", "bench", "init"):
        assert command in out.stdout


def test_bare_import_of_a_mapped_folder_is_refused() -> None:
    for folder in ("kernels", "jobs"):
        out = subprocess.run(
            [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True
        )
        assert f"import batchmla.{folder}" in out.stderr
