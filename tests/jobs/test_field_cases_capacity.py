"""Field cases of capacity, reuse and repeatability, through whole jobs."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from echo_job import EchoEngine, EchoJob
from scripted import (
    ScriptedEngine,
    ScriptedTable,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
    write_rows,
)

from batchmla.core import Prompt
from batchmla.jobs.progress import progress_path
from batchmla.jobs.report_data import read_report
from batchmla.jobs.row import Row
from batchmla.jobs.run import run_job
from batchmla.jobs.spec import build_spec

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline_memory.py"


class Tally:
    """Jobs for the shipped model in exact mode; each has an input and an output of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def ids(self, rows: Sequence[tuple[str, str]], **sections: Any) -> dict[str, list[int]]:
        """Token ids by row id. `limits`: of runs to be made one after the other."""
        self._count += 1
        source, output = (self._folder / f"{kind}{self._count}" for kind in ("in.jsonl", "out"))
        source = source.with_suffix(".jsonl")
        lines = [json.dumps({"id": name, "text": text}) for name, text in rows]
        source.write_text("\n".join(lines) + "\n")
        values: dict[str, Any] = {
            "model": {"path": "builtin:tally", "max_model_len": 256},
            "input": {"path": str(source)},
            "prompt": {"user": "{{ text }}"},
            "sampling": {"max_tokens": 8, "ignore_eos": True, "temperature": 0.8, "seed": 42},
            "engine": {"deterministic": True, "max_num_seqs": 8},
            "output": {"path": str(output), "token_ids": True},
        }
        limits = sections.pop("limits", [None])
        for name, section in sections.items():
            values[name] = {**values[name], **section}
        for limit in limits:
            assert run_job(build_spec(values), progress="off", limit=limit).exit_code == 0
        found = ds.dataset(output).to_table(columns=["row_id", "token_ids"]).to_pylist()
        return {row["row_id"]: row["token_ids"] for row in found}


ROWS = [("probe", "2 bolts at 3.50 and a box")] + [
    (f"n{n}", "2 bolts at 3.50 " + "and 7 nails " * (n % 4) + str(n)) for n in range(1, 8)
]


def test_fc_100_the_same_row_in_other_company_has_the_same_ids(tmp_path: Path) -> None:
    tally, greedy = Tally(tmp_path), {"temperature": 0}
    (probe,) = tally.ids(ROWS[:1], sampling=greedy).values()
    assert len(probe) == 8
    everyone = tally.ids(ROWS, sampling=greedy)
    last = tally.ids(ROWS[::-1], sampling=greedy, engine={"max_batched_tokens": 8})
    assert everyone["probe"] == last["probe"] == probe
    assert everyone == last


def test_fc_101_a_seed_survives_other_batches_a_resume_and_rows_removed(tmp_path: Path) -> None:
    tally = Tally(tmp_path)
    first = tally.ids(ROWS)
    assert len({tuple(ids) for ids in first.values()}) > 1  # sampled, not one answer for all
    assert tally.ids(ROWS[::-1], engine={"max_num_seqs": 3}) == first
    assert tally.ids(ROWS, limits=[3, None]) == first
    some = tally.ids(ROWS[::3])
    assert some == {name: first[name] for name in some}
    assert tally.ids(ROWS, sampling={"seed": 43}) != first


def test_fc_109_memory_is_bounded_by_the_rows_in_flight() -> None:
    """80 thousand rows take less than 20 bytes a row plus 50 MB more than 20 thousand."""
    rows = 20_000, 80_000
    command = [sys.executable, str(SCRIPT), *map(str, rows), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["large"]["rows"] == rows[1]
    assert found["grown_bytes"] < 20 * (rows[1] - rows[0]) + 50_000_000


class HeldTable(ScriptedTable):
    """Gives its first rows, and the others only after a row has finished."""

    def __init__(self, path: Path, has_finished: threading.Event) -> None:
        super().__init__(path)
        self._has_finished = has_finished
        self.waited = False

    def rows(
        self, start: int, limit: int | None, columns: Sequence[str] | None = None
    ) -> Iterator[list[Row]]:
        for batch in super().rows(start, limit, columns):
            yield batch
            assert self._has_finished.wait(60), "no row finished while others were unread"
            self.waited = True


def test_fc_110_the_first_rows_run_while_others_are_read(tmp_path: Path) -> None:
    """And `progress.json` says so: phase, rows and rates."""
    source, has_finished = tmp_path / "in.parquet", threading.Event()
    write_rows(source, sample_texts(3000))
    table = HeldTable(source, has_finished)
    engine = ScriptedEngine(on_completion=lambda _: has_finished.set())
    seams = replace(scripted_seams(engine), table=lambda spec: table)
    summary = run_scripted(scripted_spec(source, tmp_path / "out"), seams)
    assert summary.exit_code == 0 and summary.done == 3000 and table.waited
    beat = json.loads(progress_path(tmp_path / "out").read_text())
    assert beat["done"] == beat["rows"] == 3000 and beat["phase"] == "writing"
    assert {"rows_per_s", "tokens_per_s", "eta_s", "running", "waiting"} <= set(beat)


class LimitEngine(EchoEngine):
    """Notes the limits that rows come with; every row ends by length."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: set[int | None] = set()

    def _complete(self, prompt: Prompt) -> Any:
        self.limits.add(prompt.params.max_tokens)
        return super()._complete(prompt)


def test_fc_113_without_max_tokens_no_small_number_is_put_in(tmp_path: Path) -> None:
    """Half of the rows of a job with a limit end by it, and the report counts them."""
    source = tmp_path / "in.jsonl"
    texts = ["a word", "many more words than two, and then some"] * 10
    source.write_text(
        "".join(json.dumps({"id": n, "prompt": t}) + "\n" for n, t in enumerate(texts))
    )
    job, engine = EchoJob(tmp_path, source), LimitEngine()
    assert job.run(engine).exit_code == 0 and engine.limits == {None}
    assert job.contents() == texts
    assert job.run(fresh=True, sampling={"max_tokens": 8}).exit_code == 0
    counted = read_report(job.output).counts.finish_reasons
    assert counted == {"length": 10, "stop": 10}
