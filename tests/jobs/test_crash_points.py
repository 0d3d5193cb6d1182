"""A run that dies at any single effect on the disk, and the run after it: nothing lost or doubled.

Every effect is tried in turn: creating, syncing and renaming a segment, a part, the manifest, the
summary and `_SUCCESS`, each line of the ledger, each deletion, the lease.
"""

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import ERRNOS, FaultStore, PowerStore, QuickStore, die, die_torn, failing
from scripted import (
    ScriptedEngine,
    ScriptedText,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
    write_rows,
)

from batchmla.errors import StorageError
from batchmla.jobs import manifest
from batchmla.jobs.journal import Pace
from batchmla.jobs.status import read_status
from batchmla.jobs.store import Store

NUM_ROWS = 20
ROWS_PER_FILE = 8
BAD, POISON = 3, 14
Opener = Callable[[Path], Store]


@dataclass(frozen=True)
class Scenario:
    """A run to be disturbed, after a run that was not."""

    before: dict[str, Any] | None  # wishes of the earlier run, if any
    wishes: dict[str, Any] = field(default_factory=dict)
    heals: bool = False  # the poisoned row does well in the disturbed run


SCENARIOS = {
    "first": Scenario(None),
    "growing": Scenario({"limit": 11}),
    "retry": Scenario({}, {"retry_failed": True}, heals=True),
    "fresh": Scenario({}, {"fresh": True}),
}


class Bench:
    """One input, and outputs at a given state to run on."""

    def __init__(self, folder: Path) -> None:
        texts = sample_texts(NUM_ROWS)
        texts[BAD], texts[POISON] = "bad", "poison"
        self.source = write_rows(folder / "in.parquet", texts)
        self.folder = folder

    def run(
        self, output: Path, store: Opener = QuickStore, *, heals: bool = False, **wishes: Any
    ) -> Any:
        spec = scripted_spec(
            self.source, output, output={"rows_per_file": ROWS_PER_FILE}, errors={"max": 2}
        )
        text = ScriptedText(poison="no more" if heals else "poison")
        engine = ScriptedEngine(max_running=6)
        seams = scripted_seams(engine, text=text, store=store, pace=Pace(rows=6))
        return run_scripted(spec, seams, **wishes)

    def start(self, scenario: Scenario, name: str) -> Path:
        """A new output folder in the state before the disturbed run."""
        output = self.folder / name
        if scenario.before is not None:
            made = self.folder / "-".join(["before", *map(str, scenario.before)])
            if not made.exists():
                self.run(made, **scenario.before)
            shutil.copytree(made, output)
        return output


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "versions", lambda: {"batchmla": "0"})  # a quarter of the time
        yield Bench(tmp_path_factory.mktemp("crash"))


def parts(output: Path) -> dict[str, pa.Table]:
    """Each part by its name, read whole: a reader of the folder may come at any time."""
    return {path.name: pq.read_table(path) for path in sorted(output.glob("part-*"))}


def expected(bench: Bench, scenario: Scenario) -> dict[str, pa.Table]:
    """The parts of a run that nothing disturbs."""
    output = bench.start(scenario, "undisturbed")
    summary = bench.run(output, heals=scenario.heals, **scenario.wishes)
    assert summary.exit_code == 0 and summary.failed == 2 - scenario.heals
    found = parts(output)
    shutil.rmtree(output)
    assert [table.num_rows for table in found.values()] == [8, 8, 4]
    rows = [row for table in found.values() for row in table.to_pylist()]
    assert [row["doc"] for row in rows] == [f"d{i}" for i in range(NUM_ROWS)]
    failed = [BAD] if scenario.heals else [BAD, POISON]
    assert [i for i, row in enumerate(rows) if row["error"]] == failed
    return found


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
    assert {*left, "progress.json"} == known and (output / "_SUCCESS").exists()


def disturb(
    bench: Bench, scenario: Scenario, output: Path, store: Callable[[Path], FaultStore]
) -> FaultStore | None:
    """The disturbed run; None when it ended before its fault."""
    made: list[FaultStore] = []

    def opened(root: Path) -> Store:
        made.append(store(root))
        return made[0]

    wishes = {**scenario.wishes, "heals": scenario.heals}
    try:
        bench.run(output, opened, **wishes)
    except SystemExit:
        assert made[0].is_dead
    except StorageError as error:
        assert made[0].struck is not None and "finished rows are kept" in str(error)
    return made[0] if made[0].struck is not None else None


FAULTS: dict[str, Callable[[Path, int], FaultStore]] = {
    "killed": lambda root, at: FaultStore(root, at, die),
    "torn": lambda root, at: FaultStore(root, at, die_torn),
    "power lost": PowerStore,
    "power partly lost": lambda root, at: PowerStore(root, at, random.Random(at)),
    "refused": lambda root, at: FaultStore(root, at, failing(ERRNOS[at % len(ERRNOS)])),
}


@pytest.mark.parametrize(
    ("name", "fault", "stride"),  # the others are thrown in by the kill campaign
    [
        ("first", "killed", 1),
        ("first", "power lost", 1),
        ("first", "refused", 2),
        ("growing", "killed", 2),
        ("retry", "power lost", 2),
        ("fresh", "killed", 3),
    ],
)
def test_a_fault_at_every_single_effect(bench: Bench, name: str, fault: str, stride: int) -> None:
    scenario = SCENARIOS[name]
    good = expected(bench, scenario)
    struck: list[str] = []
    for at in itertools.count(1, stride):
        output = bench.start(scenario, f"{name}-{fault}-{at}".replace(" ", "-"))
        store = disturb(bench, scenario, output, lambda root, at=at: FAULTS[fault](root, at))
        if store is None:
            break
        struck.append(store.struck or "")
        for table in parts(output).values():
            assert table.column_names == good["part-00000.parquet"].column_names
        is_begun = (output / "_batchmla" / "manifest.json").exists()
        done = read_status(output).done if is_begun else 0
        if (output / "_SUCCESS").exists():
            assert sum(table.num_rows for table in parts(output).values()) == done == NUM_ROWS
        summary = bench.run(output, heals=scenario.heals, **scenario.wishes)
        if not scenario.wishes:
            assert summary.rows_this_run == NUM_ROWS - done, f"after {struck[-1]}"
        check_ended(output, good, summary)
        shutil.rmtree(output)
    assert len(struck) * stride > 30
    for effect in ("create", "sync", "rename", "append", "remove", "overwrite"):
        assert any(each.startswith(effect) for each in struck), effect
