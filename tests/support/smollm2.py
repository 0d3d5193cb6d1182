"""The example examples/smollm2 for tests: its scripts as modules, and the model they make."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2"


def script(name: str) -> ModuleType:
    """The example's script `name` as a module."""
    module_name = f"smollm2_{name}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def model_folder() -> Path:
    """The converted model, made once per version of the script; skips when pip cannot fetch it."""
    make_model = script("make_model")
    folder = EXAMPLE / "out" / "model"
    try:
        make_model.make(folder)
    except make_model.DownloadError as error:
        pytest.skip(str(error))
    return folder
