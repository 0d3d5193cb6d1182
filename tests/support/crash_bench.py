"""Runs of one small job to be disturbed, and what their outputs have to be in the end."""

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
            made = self.folder / "-".join(["before", *map(str, scenario.before)])
            if not made.exists():
                self.run(made, **scenario.before)
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
