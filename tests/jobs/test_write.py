"""Parts: ranges, groups within memory, and what is announced before it is published."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmla.errors import JobError, StorageError
from batchmla.jobs import write
from batchmla.jobs.columns import Finished, output_schema
from batchmla.jobs.journal import Journal, Pace
from batchmla.jobs.ledger import Ledger, Part, Tally
from batchmla.jobs.store import Store
from batchmla.jobs.write import Carried, PartFormat, Writer

CARRIED = pa.schema([("n", pa.int64())])


def batches(start: int) -> Iterator[pa.RecordBatch]:
    for first in range(0, 100, 7):
        numbers = [n for n in range(first, min(first + 7, 100)) if n >= start]
        if numbers:
            yield pa.record_batch({"n": numbers}, schema=CARRIED)


def make_writer(root: Path, num_done: int) -> Writer:
    store = Store(root)
    store.open()
    journal = Journal(store, job="job", token_ids=False, pace=Pace())
    journal.recover([])
    for start in range(0, num_done, 9):  # segments that lie across each other
        for index in range(start, min(start + 9, num_done)):
            other = index * 37 % num_done if num_done == 100 else index
            row = Finished(other, 0, other, f"d{other}", content="x" * 50, prompt_tokens=2)
            journal.add(row, 100)
        journal.flush()
    form = PartFormat(
        carried=CARRIED, prefix="", token_ids=False, rows_per_file=30, compression="none"
    )
    return Writer(
        store=store, ledger=Ledger(store), journal=journal, form=form,
        carried=Carried(CARRIED, batches),
    )  # fmt: skip


def read(root: Path) -> list[tuple[int, str]]:
    rows = []
    for path in sorted(root.glob("part-*.parquet")):
        rows += pq.read_table(path, columns=["n", "row_id"]).to_pylist()
    return [(row["n"], row["row_id"]) for row in rows]


def test_parts_come_as_soon_as_their_rows_are_done(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, 61)
    writer.advance(None)
    assert writer.stop == 60 and read(tmp_path) == [(n, f"d{n}") for n in range(60)]
    writer.advance(61)
    assert writer.is_complete(61) and len(read(tmp_path)) == 61


@pytest.mark.parametrize("group_bytes", [1, 700, 1 << 30])
def test_a_part_is_the_same_however_many_groups_it_is_written_in(
    tmp_path: Path, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "GROUP_BYTES", group_bytes)
    writer = make_writer(tmp_path, 100)
    writer.advance(100)
    assert read(tmp_path) == [(n, f"d{n}") for n in range(100)]
    groups = pq.read_metadata(tmp_path / "part-00000.parquet").num_row_groups
    assert groups == {1: 30, 1 << 30: 1}.get(group_bytes, groups) and groups >= 1
    assert not list(writer.journal.folder.iterdir())


def test_the_ledger_names_every_part_and_survives_a_cut_line(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, 100)
    writer.advance(100)
    lines = [json.loads(line) for line in writer.ledger.path.read_bytes().split(b"\n") if line]
    assert [(each["start"], each["stop"]) for each in lines] == [
        (0, 30),
        (30, 60),
        (60, 90),
        (90, 100),
    ]
    assert writer.ledger.tally() == Tally(rows=100, prompt_tokens=200)
    with writer.ledger.path.open("ab") as file:
        file.write(b'\n{"number": 4, "sta')
    made = tmp_path / "made"
    made.write_bytes(b"a part in the making")
    writer.ledger.announce(Part(number=4, start=100, stop=101), made)
    assert [part.number for part in writer.ledger.read()] == [0, 1, 2, 3, 4]
    found = list(writer.ledger.published(writer.form.schema))
    assert [is_sound for _, is_sound in found] == [True] * 4


def test_a_segment_that_goes_while_the_job_runs_is_not_passed_over(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, 61)
    victim = min(writer.journal.folder.iterdir())
    victim.write_bytes(b"")
    with pytest.raises(StorageError, match="cannot any more"):
        writer.advance(None)
    assert not list(tmp_path.glob("part-*"))


def test_an_input_that_has_shrunk_is_noticed(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, 60)
    writer.carried = Carried(CARRIED, lambda start: iter(list(batches(start))[:2]))
    with pytest.raises(JobError, match="second reading"):
        writer.advance(None)


def test_stopping_leaves_the_rest_for_the_next_run(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, 61)
    writer.advance(None, lambda: writer.stop >= 30)
    assert writer.stop == 30 and len(read(tmp_path)) == 30


def test_every_clash_is_refused_and_the_prefix_helps() -> None:
    carried = pa.schema([("error", pa.string())])
    with pytest.raises(JobError, match="'error'"):
        output_schema(carried, "", token_ids=False)
    assert "x_error" in output_schema(carried, "x_", token_ids=False).names
    with pytest.raises(JobError, match="'x_token_ids'"):
        output_schema(pa.schema([("x_token_ids", pa.int8())]), "x_", token_ids=True)
