"""Runs of one small job to be disturbed, and what their outputs have to be in the end."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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
from batchmla.jobs.journal import Pace
from batchmla.jobs.store import Store

NUM_ROWS = 20
ROWS_PER_FILE = 8
BAD, POISON = 3, 14
JSONL: dict[str, Any] = {"output": {"format": "jsonl"}}
Opener = Callable[[Path], Store]


@dataclass(frozen=True)
class Scenario:
    """A run to be disturbed, after a run that was not."""

    before: dict[str, Any] | None  # wishes of the earlier run, if any
    wishes: dict[str, Any] = field(default_factory=dict)
    heals: bool = False  # the poisoned row does well in the disturbed run
    sections: dict[str, Any] = field(default_factory=dict)  # of the job file
    num_samples: int = 1

    @property
    def num_rows(self) -> int:
        """Of the output."""
        return NUM_ROWS * self.num_samples


SCENARIOS = {
    "first": Scenario(None),
    "growing": Scenario({"limit": 11}),
    "retry": Scenario({}, {"retry_failed": True}, heals=True),
    "fresh": Scenario({}, {"fresh": True}),
    "lines": Scenario({"limit": 11}, sections=JSONL),
    "lines retried": Scenario({}, {"retry_failed": True}, heals=True, sections=JSONL),
    "samples": Scenario({"limit": 5}, sections={"sampling": {"n": 2}}, num_samples=2),
}


class Bench:
    """One input, and outputs at a given state to run on."""

    def __init__(self, folder: Path) -> None:
        texts = sample_texts(NUM_ROWS)
        texts[BAD], texts[POISON] = "bad", "poison"
        self.source = write_rows(folder / "in.parquet", texts)
        self.folder = folder

    def run(
        self,
        output: Path,
        store: Opener = QuickStore,
        *,
        heals: bool = False,
        sections: dict[str, Any] | None = None,
        **wishes: Any,
    ) -> Any:
        """Runs the job into `output`, or goes on with it."""
        made: dict[str, Any] = {"errors": {"max": 4}, **(sections or {})}
        made["output"] = {"rows_per_file": ROWS_PER_FILE, **made.get("output", {})}
        spec = scripted_spec(self.source, output, **made)
        text = ScriptedText(poison="no more" if heals else "poison")
        engine = ScriptedEngine(max_running=6)
        seams = scripted_seams(engine, text=text, store=store, pace=Pace(rows=6))
        return run_scripted(spec, seams, **wishes)

    @staticmethod
    def pace(num_rows: int) -> Pace:
        """Segments of so many rows."""
        return Pace(rows=num_rows)

    def remove(self, name: str) -> None:
        """Takes an output folder away."""
        shutil.rmtree(self.folder / name)

    def start(self, scenario: Scenario, name: str) -> Path:
        """A new output folder in the state before the disturbed run."""
        output = self.folder / name
        if scenario.before is not None:
            made = self.folder / f"before {scenario.before} {scenario.sections}".replace("'", "")
            if not made.exists():
                self.run(made, sections=scenario.sections, **scenario.before)
            shutil.copytree(made, output)
        return output


FAULTS: dict[str, Callable[[Path, int], FaultStore]] = {
    "killed": lambda root, at: FaultStore(root, at, die),
    "torn": lambda root, at: FaultStore(root, at, die_torn),
    "power lost": PowerStore,
    "power partly lost": lambda root, at: PowerStore(root, at, random.Random(at)),
    "refused": lambda root, at: FaultStore(root, at, failing(ERRNOS[at % len(ERRNOS)])),
}


def parts(output: Path) -> dict[str, pa.Table]:
    """Each part by its name, read whole: a reader of the folder may come at any time."""
    found = {}
    for path in sorted(output.glob("part-*")):
        if path.suffix == ".parquet":
            found[path.name] = pq.read_table(path)
        else:
            lines = path.read_text().splitlines()
            found[path.name] = pa.Table.from_pylist([json.loads(line) for line in lines])
    return found


def whole(tables: dict[str, pa.Table]) -> pa.Table:
    """All parts as one table; columns of JSONL that hold only nulls take a type from others."""
    return pa.concat_tables(tables.values(), promote_options="permissive")


def keys(table: pa.Table) -> list[tuple[str, int | None]]:
    """What each row of an output is known by."""
    return [(row["doc"], row.get("sample")) for row in table.to_pylist()]


def expected(bench: Bench, scenario: Scenario) -> dict[str, pa.Table]:
    """The parts of a run that nothing disturbs."""
    output = bench.start(scenario, "undisturbed")
    summary = bench.run(output, heals=scenario.heals, sections=scenario.sections, **scenario.wishes)
    samples = [None] if scenario.num_samples == 1 else range(scenario.num_samples)
    failed = {BAD} if scenario.heals else {BAD, POISON}
    assert (summary.exit_code, summary.failed) == (0, len(failed) * len(samples))
    found = parts(output)
    shutil.rmtree(output)
    counts = [table.num_rows for table in found.values()]
    assert set(counts[:-1]) == {ROWS_PER_FILE} and sum(counts) == scenario.num_rows
    rows = [row for table in found.values() for row in table.to_pylist()]
    assert [key for table in found.values() for key in keys(table)] == [
        (f"d{i}", sample) for i in range(NUM_ROWS) for sample in samples
    ]
    assert {int(row["doc"][1:]) for row in rows if row["error"]} == failed
    return found


def disturb(
    bench: Bench, scenario: Scenario, output: Path, store: Callable[[Path], FaultStore]
) -> FaultStore | None:
    """The disturbed run; None when it ended before its fault."""
    made: list[FaultStore] = []

    def opened(root: Path) -> Store:
        made.append(store(root))
        return made[0]

    wishes = {**scenario.wishes, "heals": scenario.heals, "sections": scenario.sections}
    try:
        bench.run(output, opened, **wishes)
    except SystemExit:
        assert made[0].is_dead
    except StorageError as error:
        assert made[0].struck is not None and "finished rows are kept" in str(error)
    return made[0] if made[0].struck is not None else None
