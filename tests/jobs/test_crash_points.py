"""A run that dies at any single effect on the disk, and the run after it: nothing lost or doubled.

Every effect is tried in turn: creating, syncing and renaming a segment, a part, the manifest, the
summary and `_SUCCESS`, each line of the ledger, each deletion, the lease.
"""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crash_bench import FAULTS, SCENARIOS, Bench, disturb, expected, parts

from batchmla.jobs.status import read_status


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("crash"))


def check_ended(output: Path, good: dict[str, pa.Table], summary: Any) -> None:
    """A job that is complete, with nothing left over."""
    assert summary.exit_code == 0 and summary.duplicates == 0
    found = parts(output)
    assert list(found) == list(good)
    for name, table in found.items():
        assert table.equals(good[name]), name
    own = output / "_batchmla"
    left = {str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()}
    known = {"lease", "manifest.json", "parts.jsonl", "progress.json", "run.log", "summary.json"}
    known.add("series.jsonl")
    assert {*left, "progress.json", "series.jsonl"} == known and (output / "_SUCCESS").exists()


@pytest.mark.parametrize(
    ("name", "fault", "stride"),  # the others are thrown in by the kill campaign
    [
        ("first", "killed", 1),
        ("first", "power lost", 3),
        ("first", "refused", 7),
        ("growing", "killed", 4),
        ("retry", "power lost", 4),
        ("fresh", "killed", 5),
        ("lines", "torn", 7),
        ("lines retried", "power lost", 5),
        ("samples", "power partly lost", 7),
    ],
)
def test_a_fault_at_every_single_effect(bench: Bench, name: str, fault: str, stride: int) -> None:
    scenario = SCENARIOS[name]
    good, total = expected(bench, scenario), scenario.num_rows
    struck: list[str] = []
    for at in itertools.count(1, stride):
        output = bench.start(scenario, f"{name}-{fault}-{at}".replace(" ", "-"))
        store = disturb(bench, scenario, output, lambda root, at=at: FAULTS[fault](root, at))
        if store is None:
            break
        struck.append(store.struck or "")
        for table in parts(output).values():
            assert table.column_names == next(iter(good.values())).column_names
        is_begun = (output / "_batchmla" / "manifest.json").exists()
        done = read_status(output).done if is_begun else 0
        if (output / "_SUCCESS").exists():
            assert sum(table.num_rows for table in parts(output).values()) == done == total
        summary = bench.run(
            output, heals=scenario.heals, sections=scenario.sections, **scenario.wishes
        )
        if not scenario.wishes:
            assert summary.rows_this_run == total - done, f"after {struck[-1]}"
        check_ended(output, good, summary)
        shutil.rmtree(output)
    kinds = {each.partition(" ")[0] for each in struck}
    assert len(struck) * stride > 30
    if stride == 1:
        assert kinds == {"mkdir", "create", "sync", "rename", "append", "remove", "overwrite"}
