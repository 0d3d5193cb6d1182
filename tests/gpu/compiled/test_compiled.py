"""Every kernel as machine code: registers, shared memory, tensor cores; writes a table of them."""

import importlib
import json
import pkgutil
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import triton
from triton_aot import INSTRUCTIONS, Code, compile_case

import batchmla.kernels.triton as package
from batchmla.kernels.triton.aot import SHARED_LIMIT_BYTES, AotCase

PINNED = "3.6.0"
OTHER_STACK_BYTES = 24  # register allocation differs between releases
TABLE = Path(__file__).parents[3] / "benchmarks/results/aot.md"


def modules_with_kernels() -> Iterator[tuple[str, tuple[AotCase, ...]]]:
    """Names of modules that define a kernel, and their cases."""
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        kernels = [
            value for value in vars(module).values()
            if isinstance(value, triton.runtime.JITFunction) and value.__module__ == module.__name__
        ]  # fmt: skip
        if kernels:
            yield found.name, getattr(module, "AOT_CASES", ())


MODULES = dict(modules_with_kernels())
CASES = [(case, target) for cases in MODULES.values() for case in cases for target in case.targets]


class Codes:
    """What the tests of all processes of a run find, in files; the last one leaves the table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def add(self, case: AotCase, code: Code) -> None:
        """Notes one."""
        name = f"{[each.name for each, _ in CASES].index(case.name)}-{code.target}.json"
        draft = self._folder / f"{name}.draft"
        draft.write_text(json.dumps({"name": case.name, **asdict(code)}))
        draft.replace(self._folder / name)
        found = list(self._folder.glob("*.json"))
        if len(found) == len(CASES) and triton.__version__ == PINNED:
            entries = [json.loads(each.read_text()) for each in found]
            TABLE.write_text(
                table({(each.pop("name"), each["target"]): Code(**each) for each in entries})
            )
            shutil.rmtree(self._folder)


@pytest.fixture(scope="session")
def codes(testrun_uid: str) -> Codes:
    """Of this run."""
    return Codes(Path(tempfile.gettempdir()) / f"batchmla-codes-{testrun_uid}")


def table(codes: dict[tuple[str, int], Code]) -> str:
    """One line a kernel and target, as Markdown."""
    names = [name for name in INSTRUCTIONS if name not in ("LDL", "STL")]
    lines = [
        f"Compiled by triton {triton.__version__}, without a GPU; written by the tests.", "",
        "| kernel | sm | registers | stack B | local | shared KiB | " + " | ".join(names) + " |",
        "|" + " --- |" * (6 + len(names)),
    ]  # fmt: skip
    for (name, target), code in sorted(codes.items()):
        counts = " | ".join(str(code.counts[each]) for each in names)
        lines.append(
            f"| {name} | {target} | {code.registers} | {code.stack_bytes} | {code.spills} | "
            f"{code.shared_bytes / 1024:.1f} | {counts} |"
        )
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_cases(module: str) -> None:
    assert MODULES[module], f"kernels/triton/{module}.py has kernels but no AOT_CASES"


def test_names_are_distinct() -> None:
    names = [case.name for cases in MODULES.values() for case in cases]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("case", "target"), CASES, ids=[f"{case.name}-sm{target}" for case, target in CASES]
)
def test_code(case: AotCase, target: int, codes: Codes) -> None:
    code = compile_case(case, target)
    codes.add(case, code)
    if target in case.strict_on:
        allowed_bytes = 0 if triton.__version__ == PINNED else OTHER_STACK_BYTES
        assert code.stack_bytes <= allowed_bytes, code
        assert code.shared_bytes <= SHARED_LIMIT_BYTES, code
        if triton.__version__ == PINNED:
            assert code.spills == 0, code
    if target == 90:
        missing = [name for name in case.requires if not code.counts[name]]
        assert not missing, (missing, code)
