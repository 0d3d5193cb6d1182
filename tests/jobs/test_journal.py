"""Segments, the merge of duplicates, damage, and one bit a row."""

import random
from pathlib import Path

import numpy as np
import pytest

from batchmla.errors import JobError
from batchmla.jobs.columns import Finished
from batchmla.jobs.done import DoneRows
from batchmla.jobs.journal import Journal, Pace
from batchmla.jobs.segments import Segment, segment_name
from batchmla.jobs.store import Store


def make_journal(root: Path, job: str = "job", **pace: float) -> Journal:
    store = Store(root)
    store.open()
    journal = Journal(store, job=job, token_ids=False, pace=Pace(**{"rows": 10, **pace}))
    journal.recover([])
    return journal


def finished(index: int, content: str = "text", error: str | None = None) -> Finished:
    return Finished(index, 0, index, f"d{index}", content=content, prompt_tokens=3, error=error)


def put(journal: Journal, rows: list[Finished]) -> None:
    for row in rows:
        journal.add(row, 100)
    journal.flush()


def test_rows_come_back_by_index_whatever_the_order_they_finished_in(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    order = list(range(60))
    random.Random(0).shuffle(order)
    for index in order:
        journal.add(finished(index, f"text {index}"), 100)
        if journal.is_due():
            journal.flush()
    again = make_journal(tmp_path)
    assert again.done.count == 60 and again.tally.prompt_tokens == 180
    table = again.rows(7, 44)
    assert table.column("index").to_pylist() == list(range(7, 44))
    assert table.column("content").to_pylist() == [f"text {i}" for i in range(7, 44)]


def test_a_row_counts_only_once_it_is_on_the_disk(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    journal.add(finished(0), 100)
    assert journal.done.count == 0 and make_journal(tmp_path).done.count == 0
    journal.flush()
    assert journal.done.count == 1 and make_journal(tmp_path).done.count == 1


@pytest.mark.parametrize("pace", [{"rows": 3}, {"num_bytes": 250}])
def test_a_segment_is_due_by_rows_or_bytes(tmp_path: Path, pace: dict[str, float]) -> None:
    journal = make_journal(tmp_path, **{"rows": 1000, **pace})
    for index in range(2):
        journal.add(finished(index), 100)
        assert not journal.is_due()
    journal.add(finished(2), 100)
    assert journal.is_due()


def test_a_segment_is_due_by_time(tmp_path: Path) -> None:
    journal = make_journal(tmp_path, wait_s=0.0)
    assert not journal.is_due()
    journal.add(finished(0), 100)
    assert journal.is_due()


def test_of_two_segments_with_a_row_the_lowest_name_wins_and_the_other_is_counted(
    tmp_path: Path,
) -> None:
    journal, zombie = make_journal(tmp_path), make_journal(tmp_path)
    put(journal, [finished(0, "a"), finished(5, "a")])
    put(zombie, [finished(0, "z"), finished(1, "z"), finished(5, "z")])
    names = sorted(path.name for path in journal.folder.iterdir())
    assert len(names) == 2
    again = make_journal(tmp_path)
    assert again.done.count == again.tally.rows == 3
    table = again.rows(0, 10)
    assert table.column("index").to_pylist() == [0, 1, 5] and again.duplicates == 2
    winner = "a" if f".{journal._run}-" in names[0] else "z"
    assert table.column("content").to_pylist() == [winner, "z", winner]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_segment_is_ignored_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    journal = make_journal(tmp_path)
    put(journal, [finished(i, f"some text {i}") for i in range(20)])
    put(journal, [finished(i) for i in range(20, 30)])
    path = min(journal.folder.iterdir())
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 4] ^= 0x55
    elif damage == "empty":
        data = bytearray()
    else:
        data = bytearray(b"not Parquet at all, but long enough to look like a file")
    path.write_bytes(data)
    again = make_journal(tmp_path)
    assert again.done.missing(0, 30).tolist() == list(range(20))
    assert path.name in caplog.text and "done again" in caplog.text
    put(again, [finished(i, "anew") for i in range(20)])
    assert again.rows(0, 20).column("content").to_pylist() == ["anew"] * 20
    again.drop_published(30)
    assert not list(again.folder.iterdir())


def test_a_segment_of_another_job_is_refused(tmp_path: Path) -> None:
    put(make_journal(tmp_path, job="other"), [finished(0)])
    with pytest.raises(JobError, match="belongs to another job"):
        make_journal(tmp_path)


def test_a_renamed_segment_is_not_believed(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    put(journal, [finished(0), finished(1)])
    (path,) = journal.folder.iterdir()
    path.rename(path.with_name(segment_name(100, 101, 0, "0" * 8, 0)))
    assert make_journal(tmp_path).done.count == 0


def test_only_segments_wholly_published_are_dropped(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    put(journal, [finished(0), finished(9)])
    put(journal, [finished(5), finished(10)])
    journal.drop_published(10)
    (path,) = journal.folder.iterdir()
    segment = Segment.of(path)
    assert segment is not None and (segment.first, segment.last) == (5, 10)
    assert journal.rows(10, 11).num_rows == 1


def test_failed_rows_are_forgotten_and_their_retry_wins(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    put(journal, [finished(0), finished(1, error="bad"), finished(2, error="bad")])
    assert journal.tally.failed == 2
    assert journal.forget_failed(iter(()), limit=2) == 1
    assert journal.done.missing(0, 3).tolist() == [1] and journal.tally.failed == 1
    put(journal, [finished(1, "good")])
    for each in (journal, make_journal(tmp_path)):
        assert each.rows(0, 3).column("content").to_pylist()[1] == "good"
        assert each.rows(0, 3).column("error").to_pylist() == [None, None, "bad"]


def test_done_rows_agree_with_a_set() -> None:
    dice = np.random.default_rng(0)
    rows, known = DoneRows(), set[int]()
    for _ in range(60):
        some = np.unique(dice.integers(0, 40_000, dice.integers(1, 900)))
        if dice.random() < 0.25:
            gone = np.array([i for i in some.tolist() if i in known], dtype=np.int64)
            rows.unmark(gone)
            known -= set(gone.tolist())
        else:
            is_new = rows.mark(some)
            assert is_new.tolist() == [i not in known for i in some.tolist()]
            known |= set(some.tolist())
        assert rows.count == len(known)
        least = next(i for i in range(50_000) if i not in known)
        assert rows.first_missing() == least
        start = int(dice.integers(0, 50_000))
        expected = [i for i in range(start, start + 300) if i not in known]
        assert rows.missing(start, start + 300).tolist() == expected
    assert all((i in rows) == (i in known) for i in range(45_000))


def test_first_missing_behind_a_long_full_stretch() -> None:
    rows = DoneRows()
    rows.mark_range(0, 300_000)
    assert rows.first_missing() == 300_000
    rows.unmark(np.array([8], dtype=np.int64))
    assert rows.first_missing() == 8 and rows.count == 299_999
