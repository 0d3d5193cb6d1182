"""The script for a GPU, dry: every piece on the CPU, without what a bare GPU image lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ABSENT = ("pydantic", "datasets", "ray", "pyarrow", "rich", "typer", "ruamel")
BLOCK = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_others(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {ABSENT!r} else find(name, path, target)
PathFinder.find_spec = classmethod(find_others)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What a dry run writes."""
    home = tmp_path_factory.mktemp("dry")
    (home / "sitecustomize.py").write_text(BLOCK)
    variables = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(home)}
    done = subprocess.run(
        ["sh", str(ROOT / "benchmarks/gpu_check.sh"), "--dry", "--results", str(home / "results")],
        env=variables, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (written,) = (home / "results").glob("gpu_check-dry-*[0-9].json")
    pieces: dict[str, dict[str, object]] = json.loads(written.read_text())["pieces"]
    return pieces


def test_every_piece_ends(report: dict[str, dict[str, object]]) -> None:
    assert list(report) == ["ceilings", "checks", "speed", "tally", "lite"]
    assert not [name for name, piece in report.items() if "fault" in piece]


def test_every_op_is_checked(report: dict[str, dict[str, object]]) -> None:
    results = {name: each for name, each in report["checks"].items() if isinstance(each, dict)}
    assert len(results) >= 38
    assert not [name for name, each in results.items() if not each["holds"]]


def test_every_kernel_is_timed_beside_its_floor(report: dict[str, dict[str, object]]) -> None:
    cases = {name: each for name, each in report["speed"].items() if isinstance(each, dict)}
    assert len(cases) >= 11
    assert all(each["us"] > 0 and each["floor_us"] > 0 for each in cases.values()), cases


def test_ids_and_rates_are_told(report: dict[str, dict[str, object]]) -> None:
    comparison, lite = report["tally"]["comparison"], report["lite"]
    assert isinstance(comparison, dict) and comparison["equal"] == comparison["prompts"]
    for peer in ("batchmla", "transformers"):
        rates = lite[peer]
        assert isinstance(rates, dict) and rates["1"]["decode_tokens_per_s"] > 0, rates
