"""Input that grew after a run: rows at the end of the last file, or files that follow."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from scripted import ScriptedEngine, run_scripted, scripted_seams, scripted_spec

from batchmla.errors import JobError
from batchmla.jobs.identity import describe_rows
from batchmla.jobs.read import open_input

Write = Callable[[Path, list[str]], None]


def write_parquet(path: Path, texts: list[str]) -> None:
    kinds = pa.array([f"kind {len(text) % 3}" for text in texts]).dictionary_encode()
    halves = pa.array([None if len(text) % 2 else [len(text)] for text in texts])
    table = pa.table({"text": pa.array(texts, pa.string()), "kind": kinds, "list": halves})
    pq.write_table(table, path, row_group_size=7)


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_csv(path: Path, texts: list[str]) -> None:
    path.write_text("text,n\n" + "".join(f'"{text}",1\n' for text in texts))


WRITERS: dict[str, Write] = {"parquet": write_parquet, "jsonl": write_jsonl, "csv": write_csv}


class Grown:
    """A folder of one format, and a job over it."""

    def __init__(self, folder: Path, ending: str) -> None:
        self.folder, self.output = folder / "in", folder / "out"
        self.folder.mkdir()
        self.ending, self.write = ending, WRITERS[ending]

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.{self.ending}"

    def run(self, engine: ScriptedEngine | None, **wishes: Any) -> Any:
        seams = replace(scripted_seams(engine), table=lambda spec: open_input(spec.input))
        loaded = scripted_spec(self.folder, self.output, output={"rows_per_file": 20})
        return run_scripted(loaded, seams, **wishes)

    def texts(self) -> list[str]:
        rows: list[str] = ds.dataset(self.output).to_table().column("text").to_pylist()
        return rows

    def part_rows(self) -> list[int]:
        parts = sorted(self.output.glob("part-*"))
        return [pq.read_metadata(part).num_rows for part in parts]


@pytest.fixture(params=list(WRITERS))
def grown(request: pytest.FixtureRequest, tmp_path: Path) -> Grown:
    return Grown(tmp_path, request.param)


def test_rows_at_the_end_of_the_last_file_are_picked_up_into_the_short_part(grown: Grown) -> None:
    texts = [f"text {i}" for i in range(60)]
    grown.write(grown.path("a"), texts[:20])
    grown.write(grown.path("b"), texts[20:33])
    assert grown.run(ScriptedEngine()).exit_code == 0 and grown.part_rows() == [20, 13]
    before = ds.dataset(grown.output).to_table().to_pylist()
    untouched = (grown.output / "part-00000.parquet").stat().st_mtime_ns
    grown.write(grown.path("b"), texts[20:50])
    engine = ScriptedEngine()
    summary = grown.run(engine)
    assert (summary.exit_code, summary.rows, summary.done) == (0, 50, 50)
    assert sorted(engine.seen) == list(range(33, 50))
    assert grown.part_rows() == [20, 20, 10] and grown.texts() == texts[:50]
    assert ds.dataset(grown.output).to_table().to_pylist()[:33] == before
    assert (grown.output / "part-00000.parquet").stat().st_mtime_ns == untouched
    grown.write(grown.path("b"), texts[20:52])
    grown.write(grown.path("c"), texts[52:])
    assert grown.run(ScriptedEngine()).rows_this_run == 10
    assert grown.part_rows() == [20, 20, 20] and grown.texts() == texts
    assert grown.run(None).exit_code == 0


def test_a_last_file_that_lost_or_changed_a_row_is_refused(grown: Grown) -> None:
    texts = [f"text {i}" for i in range(30)]
    grown.write(grown.path("a"), texts)
    grown.run(ScriptedEngine())
    for changed in (texts[:29], ["other", *texts[1:], "more"], [*texts[:29], "other", "more"]):
        grown.write(grown.path("a"), changed)
        with pytest.raises(JobError, match=rf"input file a\.{grown.ending}: .* → file 1"):
            grown.run(None)
    grown.write(grown.path("a"), [*texts, "more"])
    assert grown.run(ScriptedEngine()).rows_this_run == 1


def test_a_file_before_the_last_may_not_grow(grown: Grown) -> None:
    texts = [f"text {i}" for i in range(30)]
    grown.write(grown.path("a"), texts[:20])
    grown.write(grown.path("b"), texts[20:])
    grown.run(ScriptedEngine())
    grown.write(grown.path("a"), [*texts[:20], "more"])
    for wishes in ({}, {"accept_changes": True}):
        with pytest.raises(JobError, match=r"a\..*--fresh"):
            grown.run(None, **wishes)


def test_a_last_line_without_its_end_may_not_be_continued(tmp_path: Path) -> None:
    grown = Grown(tmp_path, "jsonl")
    grown.path("a").write_text('{"text": "one"}\n{"text": "two"}')
    grown.run(ScriptedEngine())
    grown.path("a").write_text('{"text": "one"}\n{"text": "two"} \n{"text": "three"}\n')
    with pytest.raises(JobError, match="begun with another job"):
        grown.run(None)
    grown.path("a").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    assert grown.run(ScriptedEngine()).rows_this_run == 1


def test_a_digest_of_rows_does_not_depend_on_their_batches() -> None:
    table = pa.table(
        {
            "text": [None if i % 7 == 0 else f"row {i}" for i in range(10_000)],
            "list": [None if i % 5 == 0 else list(range(i % 4)) for i in range(10_000)],
        }
    )
    whole = describe_rows(table.to_batches(), 10_000)
    assert whole is not None and whole.startswith("10000 rows, ")
    for size in (1, 999, 4096, 7000):
        small = table if size > 1 else table.slice(0, 50)
        expected = whole if size > 1 else describe_rows(small.to_batches(), 50)
        assert describe_rows(small.to_batches(size), small.num_rows) == expected
    assert describe_rows(table.slice(0, 9_999).to_batches(), 9_999) != whole
    assert describe_rows(table.to_batches(333), 9_999) == describe_rows(
        table.slice(0, 9_999).to_batches(), 9_999
    )
