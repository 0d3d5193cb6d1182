"""The series of samples: one line at a time, bounded, readable whatever was cut off."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from batchmla.errors import StorageError
from batchmla.jobs import series
from batchmla.jobs.series import MAX_LINES, Sample, Series, read_series, series_path
from batchmla.jobs.store import Effect, Store

SAMPLE = Sample(run_s=1.5, elapsed_s=0.0, done=0, failed=0, generated_tokens=7, total_pages=4)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path)
    made.open()
    return made


def test_samples_come_back_without_what_was_cut_off_or_damaged(store: Store) -> None:
    assert read_series(store.root) == []
    lines = Series(store)
    for done in range(3):
        lines.add(replace(SAMPLE, done=done, elapsed_s=5.0 * done))
    path = series_path(store.root)
    with path.open("ab") as file:
        file.write(b'[]\n{"run_s": "x", "elapsed_s": 1, "done": 1, "failed": 0}\n{"run_s": 3\n{"ru')
    Series(store).add(replace(SAMPLE, run_s=9.0))
    assert [(each.run_s, each.done) for each in read_series(store.root)] == [
        (1.5, 0), (1.5, 1), (1.5, 2), (9.0, 0),
    ]  # fmt: skip
    assert json.loads(path.read_bytes().split(b"\n")[0])["generated_tokens"] == 7


def test_a_sample_is_due_every_five_seconds(store: Store) -> None:
    lines = Series(store)
    assert lines.is_due(0.5)
    lines.add(replace(SAMPLE, elapsed_s=0.5))
    assert not lines.is_due(5.4) and lines.is_due(5.5)


def test_a_long_job_keeps_so_many_lines_and_samples_less_often(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "MAX_LINES", 50)
    assert MAX_LINES == 5000
    lines, elapsed_s, taken = Series(store), 0.0, 0
    while elapsed_s < 5000:
        if lines.is_due(elapsed_s):
            lines.add(replace(SAMPLE, elapsed_s=elapsed_s))
            taken += 1
        elapsed_s += 0.5
    kept = [each.elapsed_s for each in read_series(store.root)]
    assert len(kept) <= 50 < taken < 250
    assert kept[0] == 0 and kept[-1] > 4800 and kept == sorted(kept)
    again = Series(store)
    for number in range(200):  # many runs are bounded, too
        again.add(replace(SAMPLE, run_s=10.0 + number))
        again = Series(store)
    assert len(read_series(store.root)) <= 50


def test_a_full_disk_ends_the_series_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Store):
        def before(self, effect: Effect, path: Path, source: Path | None = None) -> None:
            if effect == "append":
                raise StorageError("the disk is full")

    store = Full(tmp_path)
    store.open()
    lines = Series(store)
    for number in range(3):
        lines.add(replace(SAMPLE, elapsed_s=5.0 * number))
    assert not lines.is_due(100.0)
    assert [record.getMessage() for record in caplog.records] == [
        "no more samples of this run: the disk is full"
    ]
