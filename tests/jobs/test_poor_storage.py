"""Disks that are full or read-only, and folders with damaged, foreign or doubled files in them."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crash_bench import NUM_ROWS, SCENARIOS, Bench, expected, parts
from faults import FaultStore, QuickStore, die
from scripted import ScriptedEngine, run_scripted, sample_texts, scripted_seams, scripted_spec
from scripted_job import Job

from batchmla.errors import JobError, StorageError
from batchmla.jobs.read import open_input
from batchmla.jobs.seams import Seams
from batchmla.jobs.segments import Segment, segment_name
from batchmla.jobs.store import Effect, Store


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class FullStore(QuickStore):
    """From its `at`-th effect on nothing more can be written; deleting works."""

    def __init__(self, root: Path, at: int, number: int = errno.ENOSPC) -> None:
        super().__init__(root)
        self._left = at
        self._number = number

    def before(self, effect: Effect, path: Path, source: Path | None = None) -> None:
        super().before(effect, path, source)
        self._left -= 1
        if self._left <= 0 and effect != "remove":
            raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_fc_146_a_disk_that_stays_full_ends_the_run_and_keeps_what_is_whole(
    bench: Bench, number: int
) -> None:
    good = expected(bench, SCENARIOS["first"])
    for at in (2, 14, 27, 40):
        output = bench.folder / f"out-{at}"
        with pytest.raises(StorageError, match=r"cannot write: .*finished rows are kept") as caught:
            bench.run(output, lambda root, at=at: FullStore(root, at, number))
        assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
        for name, table in parts(output).items():
            assert table.equals(good[name])
        summary = bench.run(output)
        assert summary.exit_code == 0 and parts(output) == good
        assert summary.rows_this_run == NUM_ROWS if at == 2 else summary.rows_this_run <= 14


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs rights that this process lacks")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_fc_146_a_small_disk_that_fills_up_and_is_freed(
    tmp_path: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, [text * 40 for text in sample_texts(4000)])
    job.sections = {"output": {"compression": "none", "rows_per_file": 500}}
    job.output = small_disk / "out"
    with pytest.raises(StorageError, match="the disk is full; free some space, then run the same"):
        job.run(ScriptedEngine())
    said = capfd.readouterr()
    assert "Traceback" not in said.err and "Logging error" not in said.err
    kept = sum(pq.read_metadata(path).num_rows for path in job.output.glob("part-*"))
    with pytest.raises(StorageError, match="the disk is full"):
        job.run(ScriptedEngine())  # full it stays
    assert kept <= sum(pq.read_metadata(path).num_rows for path in job.output.glob("part-*"))
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    summary = job.run(ScriptedEngine())
    assert summary.exit_code == 0 and summary.rows_this_run <= 4000 - kept
    assert [row["doc"] for row in job.rows()] == [f"d{i}" for i in range(4000)]


def test_a_read_only_output_is_refused_before_the_model_is_loaded(
    tmp_path: Path, small_disk: Path
) -> None:
    job = Job(tmp_path, sample_texts(50))
    job.output = small_disk / "out"
    job.run(ScriptedEngine(), limit=20)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="the file system is read-only; make it writable, then"):
        job.run(None)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert job.run(ScriptedEngine()).rows_this_run == 30


class Halted:
    """A job that died with segments on the disk, in the eyes of the next run."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.good = expected(self.bench, SCENARIOS["first"])
        self.output = folder / "out"
        with pytest.raises(SystemExit):
            self.bench.run(self.output, lambda root: FaultStore(root, 20, die))

    def segments(self) -> list[Path]:
        return sorted((self.output / "_batchmla" / "segments").glob("*.seg"))

    def finish(self) -> Any:
        """The next run, to the end of the job."""
        summary = self.bench.run(self.output)
        assert summary.exit_code == 0 and not self.segments()
        found = pa.concat_tables(parts(self.output).values())
        assert found.column("doc").to_pylist() == [f"d{i}" for i in range(NUM_ROWS)]
        return summary


@pytest.fixture
def halted(tmp_path: Path) -> Halted:
    return Halted(tmp_path)


@pytest.mark.parametrize("wins", ["zombie", "first"])
def test_of_a_zombies_segment_the_lowest_name_wins_and_the_rest_is_counted(
    halted: Halted, wins: str
) -> None:
    original = halted.segments()[0]
    segment = Segment.of(original)
    assert segment is not None
    table = pq.read_table(original, partitioning=None)
    place = table.schema.get_field_index("content")
    zombies = pa.array(["of the zombie"] * table.num_rows)
    run = "00000000" if wins == "zombie" else "ffffffff"
    name = segment_name(segment.first, segment.last, 0, run, 0)
    pq.write_table(table.set_column(place, "content", zombies), original.with_name(name))
    summary = halted.finish()
    assert summary.duplicates == table.num_rows
    found = pa.concat_tables(parts(halted.output).values())
    own = pa.concat_tables(halted.good.values()).column("content").to_pylist()
    doubled = set(table.column("index").to_pylist())
    for index, content in enumerate(found.column("content").to_pylist()):
        is_zombies = wins == "zombie" and index in doubled
        assert content == ("of the zombie" if is_zombies else own[index])


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_damaged_segment_costs_its_own_rows_only(
    halted: Halted, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    paths = halted.segments()
    held = [pq.read_metadata(path).num_rows for path in paths]
    data = paths[0].read_bytes()
    paths[0].write_bytes({"cut": data[:-9], "empty": b"", "text": b"hello " * 99}[damage])
    summary = halted.finish()
    assert summary.rows_this_run == NUM_ROWS - sum(held[1:])
    assert f"{paths[0].name} is ignored, its rows" in caplog.text


def test_a_folder_named_like_a_segment_is_left_alone(halted: Halted) -> None:
    folder = halted.segments()[0].parent / segment_name(0, 9, 0, "0" * 8, 0)
    folder.mkdir()
    assert halted.bench.run(halted.output).exit_code == 0 and halted.segments() == [folder]
    folder.rmdir()


def test_a_segment_of_another_job_is_refused_by_name(halted: Halted, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    stranger = Halted(tmp_path / "two").segments()[0]
    shutil.copy(stranger, halted.segments()[0].parent)
    with pytest.raises(JobError, match=rf"{stranger.name} belongs to another job .*move it away"):
        halted.bench.run(halted.output)
    (halted.segments()[0].parent / stranger.name).unlink()
    assert halted.finish().duplicates == 0


def test_an_output_of_another_version_is_refused_with_the_file_and_the_way_out(
    halted: Halted,
) -> None:
    path = halted.output / "_batchmla" / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"format": 1', '"format": 0'))
    with pytest.raises(
        JobError, match=r"manifest\.json cannot be read: its format is 0, and this version reads 1"
    ):
        halted.bench.run(halted.output)
    for damaged in (text.replace('"format": 1', '"format": 0'), "{", ""):
        path.write_text(damaged)
        summary = halted.bench.run(halted.output, fresh=True)
        assert (summary.exit_code, summary.rows_this_run) == (0, NUM_ROWS)


@pytest.mark.parametrize(
    ("section", "value", "words"),
    [
        ("output", {"rows_per_file": 9}, "output.rows_per_file 8, not 9"),
        ("output", {"format": "jsonl"}, "output.format parquet, not jsonl"),
        ("sampling", {"n": 2}, "sampling.n 1, not 2"),
        ("output", {"prefix": "x_"}, "begun with other columns"),
        ("output", {"token_ids": True}, "begun with other columns"),
        ("input", {"columns": ["doc"]}, "begun with other columns"),
    ],
)
def test_what_is_fixed_for_an_output_stays_whatever_is_accepted(
    tmp_path: Path, section: str, value: dict[str, Any], words: str
) -> None:
    def seams(engine: ScriptedEngine | None) -> Seams:
        return replace(scripted_seams(engine), table=lambda spec: open_input(spec.input))

    bench = Bench(tmp_path)
    sections: dict[str, Any] = {"output": {"rows_per_file": 8}}
    before = scripted_spec(bench.source, tmp_path / "out", **sections)
    run_scripted(before, seams(ScriptedEngine()), limit=8)
    sections[section] = {**sections.get(section, {}), **value}
    after = scripted_spec(bench.source, tmp_path / "out", **sections)
    for wishes in ({}, {"accept_changes": True}):
        with pytest.raises(JobError, match=words):
            run_scripted(after, seams(None), **wishes)


def test_nothing_is_left_aside_by_runs_that_died(halted: Halted) -> None:
    aside = halted.output / "_batchmla" / "aside"
    (aside / "0badcafe").mkdir()
    (aside / "0badcafe" / "part-00000.parquet").write_bytes(b"PAR1 half")
    (aside / "old.seg").write_bytes(b"of a version without folders")
    halted.finish()
    assert not list(aside.iterdir())


def test_the_folder_of_a_run_is_its_own(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    for store in (first, second):
        store.open()
        store.begin("same").write_bytes(store.aside.name.encode())
    first.publish("same", tmp_path / "first")
    second.publish("same", tmp_path / "second")
    assert (tmp_path / "first").read_text() == first.aside.name
    assert (tmp_path / "second").read_text() == second.aside.name
