"""Tables of segments stay in memory up to a limit; collections are rare only while rows stream."""

import gc
from pathlib import Path

import pyarrow as pa
import pytest
from scripted import ScriptedEngine, sample_texts
from scripted_job import Job

from batchmla.jobs import journal
from batchmla.jobs.collector import rare_collections
from batchmla.jobs.journal import Pace
from batchmla.jobs.kept_tables import KeptTables
from batchmla.jobs.segments import Segment, read_segment


def table(num_rows: int) -> pa.Table:
    return pa.table({"index": pa.array(range(num_rows), pa.int64())})


def test_the_tables_used_last_stay_within_the_limit() -> None:
    kept = KeptTables(max_bytes=8 * 30)
    for name in "abc":
        kept.keep(Path(name), table(10))
    assert kept.get(Path("a")) is not None  # used: b is the oldest now
    kept.keep(Path("d"), table(10))
    assert [kept.get(Path(name)) is not None for name in "abcd"] == [True, False, True, True]


def test_a_table_beyond_the_limit_is_not_kept_and_drives_none_out() -> None:
    kept = KeptTables(max_bytes=8 * 30)
    kept.keep(Path("a"), table(10))
    kept.keep(Path("b"), table(31))
    assert kept.get(Path("b")) is None and kept.get(Path("a")) is not None


def test_what_is_kept_again_or_dropped_counts_once() -> None:
    kept = KeptTables(max_bytes=8 * 30)
    for _ in range(9):
        kept.keep(Path("a"), table(20))
    kept.keep(Path("b"), table(10))
    assert kept.get(Path("a")) is not None
    kept.drop(Path("a"))
    kept.drop(Path("a"))
    kept.keep(Path("c"), table(20))
    assert kept.get(Path("b")) is not None and kept.get(Path("c")) is not None


def test_a_segment_that_several_parts_need_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(segment: Segment, schema: pa.Schema, job: str) -> pa.Table:
        read.append(segment.path.name)
        return read_segment(segment, schema, job)

    monkeypatch.setattr(journal, "read_segment", counted)
    job = Job(tmp_path, sample_texts(400))
    job.sections = {"output": {"rows_per_file": 40}}
    summary = job.run(ScriptedEngine(max_running=256), pace=Pace(rows=100))
    assert summary.exit_code == 0 and job.table().num_rows == 400
    assert len(read) == len(set(read)) >= 4


def test_collections_are_rare_inside_and_as_before_outside() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_what_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with rare_collections():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
