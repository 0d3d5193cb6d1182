"""Which version of a part lies in the folder, when several were announced and one published."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmla.errors import JobError
from batchmla.jobs.ledger import Ledger, Part, Tally, stamp_of
from batchmla.jobs.store import Store

SCHEMA = pa.schema([("n", pa.int64())])


class Folder:
    """An output folder with a ledger; parts hold numbers from `start` on, times `factor`."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root)
        self.store.open()
        self.ledger = Ledger(self.store)

    def announce(
        self, number: int, start: int, stop: int, *, failed: int = 0, factor: int = 1
    ) -> Part:
        tally = Tally(rows=stop - start, failed=failed)
        part = Part(number=number, start=start, stop=stop, tally=tally)
        made = self.store.begin(part.name)
        numbers = [n * factor for n in range(start, stop)]
        pq.write_table(pa.table({"n": numbers}, schema=SCHEMA), made)
        return self.ledger.announce(part, made)

    def publish(self, *args: int, **options: int) -> Part:
        part = self.announce(*args, **options)
        self.store.publish(part.name, self.store.root / part.name)
        return part

    def published(self) -> list[tuple[Part, bool]]:
        return list(self.ledger.published(SCHEMA))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_retry_announced_and_not_published_leaves_the_old_sums(folder: Folder) -> None:
    old = folder.publish(0, 0, 10, failed=3)
    new = folder.announce(0, 0, 10, failed=0, factor=2)
    assert folder.published() == [(old, True)]
    assert folder.ledger.tally() == Tally(rows=10, failed=3)
    folder.store.publish(new.name, folder.store.root / new.name)
    assert folder.published() == [(new, True)]
    assert folder.ledger.tally() == Tally(rows=10, failed=0)


def test_a_short_last_part_that_was_to_grow_is_still_the_short_one(folder: Folder) -> None:
    whole, short = folder.publish(0, 0, 10), folder.publish(1, 10, 14)
    longer = folder.announce(1, 10, 20)
    assert folder.published() == [(whole, True), (short, True)]
    folder.store.publish(longer.name, folder.store.root / longer.name)
    assert folder.published() == [(whole, True), (longer, True)]


def test_an_old_short_part_before_others_is_a_hole_and_not_a_gap(folder: Folder) -> None:
    folder.publish(0, 0, 4)
    data = (folder.store.root / "part-00000.parquet").read_bytes()
    longer, after = folder.publish(0, 0, 10), folder.publish(1, 10, 20)
    (folder.store.root / "part-00000.parquet").write_bytes(data)  # out of some backup
    assert folder.published() == [(longer, False), (after, True)]


def test_a_part_written_by_other_means_counts_by_its_rows_and_columns(folder: Folder) -> None:
    part = folder.publish(0, 0, 10)
    path = folder.store.root / part.name
    pq.write_table(pq.read_table(path), path, compression="gzip")
    assert folder.published() == [(part, True)]
    pq.write_table(pq.read_table(path).slice(1), path)
    assert folder.published() == []  # the last one, damaged, is made again


def test_a_part_that_nobody_announced_is_refused(folder: Folder) -> None:
    folder.publish(0, 0, 10)
    (folder.store.root / "part-00007.parquet").write_bytes(b"mine")
    with pytest.raises(JobError, match=r"part-00007\.parquet was not written by this job"):
        folder.published()


def test_lines_cut_off_or_damaged_are_no_lines(folder: Folder) -> None:
    part = folder.publish(0, 0, 10)
    with folder.ledger.path.open("ab") as file:
        file.write(b'\n{"number": 1, "start": 10}\n[]\n{"number": 0, "start": 0, "stop": 1')
    after = folder.publish(1, 10, 12)
    assert folder.published() == [(part, True), (after, True)]


def test_a_stamp_tells_files_of_one_size_apart(tmp_path: Path) -> None:
    stamps = set()
    for content in (b"a" * 100_000, b"a" * 99_999 + b"b", b"a" * 99_999, b""):
        (tmp_path / "file").write_bytes(content)
        stamps.add(stamp_of(tmp_path / "file"))
    assert len(stamps) == 4
