"""The output folder in a store: what is put when, what is tried again, who may write."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from remote_job import QUICK, run_remote
from scripted import ScriptedEngine, sample_texts, write_rows

from batchmla.errors import JobError, StorageError
from batchmla.jobs import remote_lease
from batchmla.jobs.lease import Lease, is_held, lease_of, lease_path
from batchmla.jobs.ledger import Ledger, Part
from batchmla.jobs.remote import RemotePath, files_in, place_of
from batchmla.jobs.remote_calls import HURRIED_S, ONCE, Patience, call, filesystem
from batchmla.jobs.remote_lease import RemoteLease
from batchmla.jobs.remote_soft import MAX_BYTES, SoftObjects
from batchmla.jobs.remote_store import RemoteStore, store_at
from batchmla.jobs.status import read_status
from batchmla.jobs.store import Store

URL = "memory://bucket/out"


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    system = fsspec.filesystem("memory")
    yield
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture
def store() -> Iterator[RemoteStore]:
    made = RemoteStore(place_of(URL), QUICK)
    made.open()
    yield made
    made.close()


def never() -> bool:
    return False


def test_paths_of_all_places_are_told_apart(tmp_path: Path) -> None:
    for text in ("s3://bucket/a/b", "gs://bucket/a b/%41?x=1#y"):
        assert str(place_of(text)) == text and isinstance(place_of(text), RemotePath)
    assert place_of(Path("s3://bucket/a/b")) == place_of("s3://bucket/a/b")  # as typer makes it
    assert str(place_of("s3://bucket/a/") / "b" / "c.d") == "s3://bucket/a/b/c.d"
    assert place_of("s3://bucket/a/b.c").with_name("d").parent == place_of("s3://bucket/a")
    assert place_of(f"file://{tmp_path}/x") == tmp_path / "x"
    for text in ("out/x", "/out/x", "c:x", "hf://name/x"):
        assert not isinstance(place_of(text), RemotePath)
    assert type(store_at(tmp_path)) is Store and type(store_at(place_of(URL))) is RemoteStore


def test_what_a_path_says_of_the_store(store: RemoteStore) -> None:
    path = store.root / "a" / "b.txt"
    assert not path.exists() and not path.is_file() and not store.root.is_dir()
    store.write(path, b"one\ntwo\n")
    assert path.is_file() and not path.is_dir() and store.root.is_dir() and store.root.exists()
    assert path.read_bytes() == b"one\ntwo\n" and path.stat().st_size == 8
    assert files_in(path.parent) == [path] and files_in(store.root) == []
    assert list(store.root.iterdir()) == [path.parent]
    with path.open() as text, path.open("rb") as raw:
        assert list(text) == ["one\n", "two\n"] and raw.seek(-4, os.SEEK_END) == 4
        assert raw.read(2) == b"tw" and raw.read() == b"o\n" and raw.read() == b""
    with pytest.raises(OSError):
        path.open("wb")
    with pytest.raises(FileNotFoundError):
        (store.root / "none").open("rb")
    assert files_in(store.root / "none") == []


def test_a_file_is_published_as_one_object_and_leaves_nothing_here(store: RemoteStore) -> None:
    made = store.begin("part-00000.parquet")
    made.write_bytes(b"whole")
    assert not store.root.exists()  # nothing half done is seen
    store.publish(made.name, store.root / made.name)
    assert (store.root / made.name).read_bytes() == b"whole" and not made.exists()
    store.close()
    assert not store.aside.exists()


def test_each_run_notes_its_parts_apart_from_the_others(tmp_path: Path) -> None:
    stores = [RemoteStore(place_of(URL)) for _ in range(3)]
    made = tmp_path / "made"
    made.write_bytes(b"x")
    for store in stores:
        time.sleep(0.002)
        store._run = RemoteStore(store.root)._run
    for turn in range(2):  # two runs that both think the output theirs
        for number, store in enumerate(stores[:2]):
            Ledger(store).announce(Part(number=2 * turn + number, start=0, stop=turn), made)
    assert [part.number for part in Ledger(stores[2]).read()] == [0, 1, 2, 3]
    Ledger(stores[2]).announce(Part(number=3, start=0, stop=9), made)
    assert Ledger(stores[0]).read()[-1].stop == 9  # the later run has the last word
    Ledger(stores[0]).remove()
    assert Ledger(stores[2]).read() == [] and not stores[0].own.exists()


class Flaky:
    """An action that fails in these ways, one after the other, and works then."""

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.faults:
            raise self.faults.pop(0)
        return "done"


def of_s3(code: str, kind: type[OSError] = OSError, number: int = errno.EIO) -> OSError:
    """As s3fs words a fault."""
    cause = Exception("of the library")
    cause.response = {"Error": {"Code": code}}  # type: ignore[attr-defined]
    error = kind(number, "The words of the store")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.EBUSY, "SlowDown"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        TimeoutError("no answer"),
        OSError("without a number"),
        of_s3("InternalError", number=errno.EREMOTEIO),
        of_s3("IncompleteBody", number=errno.EINVAL),
        of_s3("BadDigest", number=errno.EINVAL),
        of_s3("NoSuchUpload", FileNotFoundError, errno.ENOENT),
    ],
)
def test_faults_that_pass_are_tried_again(fault: OSError) -> None:
    action = Flaky(fault, fault, fault)
    assert call(URL, action, QUICK) == "done" and action.calls == 4


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (of_s3("AccessDenied", PermissionError, errno.EACCES), "permission is denied"),
        (of_s3("NoSuchBucket", FileNotFoundError, errno.ENOENT), "there is no such bucket"),
        (FileNotFoundError("key"), "it is not here"),
        (NotImplementedError(), "memory:// cannot do this"),
        (OSError(errno.EINVAL, "Bad name"), "Bad name"),
    ],
)
def test_faults_that_stay_are_told_at_once(fault: Exception, words: str) -> None:
    action = Flaky(fault)
    with pytest.raises(OSError) as caught:
        call(URL, action, QUICK)
    assert caught.value.strerror is not None and words in caught.value.strerror
    assert action.calls == 1


def test_a_fault_of_our_own_is_none_of_the_store(store: RemoteStore) -> None:
    with pytest.raises(KeyError):
        call(URL, Flaky(KeyError("ours")), QUICK)


def test_patience_ends_and_says_how_often_it_tried() -> None:
    broken = Flaky(*[ConnectionResetError(errno.ECONNRESET, "reset by peer")] * 99)
    brief = Patience(total_s=0.05, first_wait_s=0.01, most_wait_s=0.02)
    words = rf"{URL}: the store does not answer as it should \(reset by peer\), tried \d+ times"
    with pytest.raises(StorageError, match=words) as caught:
        call(URL, broken, brief)
    assert caught.value.exit_code == 4 and broken.calls >= brief.least_attempts
    with pytest.raises(StorageError, match="tried 1 times"):
        call(URL, broken, ONCE)


def test_waits_grow_are_bounded_and_differ() -> None:
    patience = Patience(first_wait_s=1.0, most_wait_s=8.0)
    waits = [[patience.wait_s(attempt) for _ in range(50)] for attempt in range(40)]
    for attempt, found in enumerate(waits):
        longest_s = min(8.0, 2.0**attempt)
        assert longest_s / 2 <= min(found) < max(found) <= longest_s


def test_a_run_that_is_to_stop_does_not_wait_long_for_a_store() -> None:
    patience = Patience(is_hurried=lambda: True)
    assert patience.is_over(HURRIED_S + 1, attempts=1) and not patience.is_over(1.0, attempts=9)
    began_s = time.monotonic()
    patience.rest(60.0)
    assert time.monotonic() - began_s < 5.0


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(JobError) as caught:
        filesystem("gs://bucket/x")
    assert str(caught.value) == (
        "gs://bucket/x cannot be reached: run pip install 'batchmla[gcs]' once"
    )
    with pytest.raises(JobError, match="no store is known by foo://; give s3://BUCKET/"):
        filesystem("foo://x/y")


def test_soft_objects_follow_and_keep_their_end() -> None:
    found: dict[Path, bytes] = {}
    broken = [True]

    def put(target: Path, data: bytes) -> None:
        if broken[0]:
            raise StorageError("down")
        found[target] = data

    soft, log = SoftObjects(put, every_s=60.0), Path("log")
    soft.add(log, b"b\n", lambda: b"a\n")
    soft.add(log, b"c\n", lambda: b"never asked again")
    soft.replace(Path("beat"), b"1")
    soft.flush()
    assert not found
    broken[0] = False
    soft.flush()
    assert found == {log: b"a\nb\nc\n", Path("beat"): b"1"}
    found.clear()
    soft.flush()
    assert not found  # nothing has changed
    soft.add(log, b"x" * MAX_BYTES + b"\nlast\n", lambda: b"")
    soft.flush()
    assert found[log] == b"last\n"
    soft.add(log, b"more\n", lambda: b"")
    soft.drop(log)
    found.clear()
    soft.flush()
    assert not found


@pytest.fixture
def quick_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_lease, "_LOOK_S", 0.02)
    monkeypatch.setattr(remote_lease, "_WATCH_S", 0.3)
    monkeypatch.setattr(remote_lease, "STALE_S", 0.5)


@pytest.mark.usefixtures("quick_lease")
def test_a_second_run_is_refused_while_the_first_one_beats(store: RemoteStore) -> None:
    other = RemoteStore(store.root)
    with RemoteLease(store, never, beat_s=0.05):
        assert is_held(store.root)
        with (
            pytest.raises(JobError, match=r"out is in use by another run \(host .*, pid \d+, seen"),
            RemoteLease(other, never),
        ):
            pass
        store.write(store.root / "x", b"still ours")
    assert not is_held(store.root) and not lease_path(store.root).exists()
    with RemoteLease(other, never):
        assert is_held(store.root)


@pytest.mark.usefixtures("quick_lease")
def test_a_silent_holder_is_followed_and_finds_out(
    store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    other = RemoteStore(store.root)
    first = RemoteLease(store, never, beat_s=1.0)  # too seldom
    with pytest.raises(JobError, match="was taken over by another run, as this one gave"), first:
        store.append_soft(store.own / "run.log", b"of the first\n")
        with RemoteLease(other, never, beat_s=0.05):
            assert "taken over from a silent run" in caplog.text
            first._beats.join()
            assert is_held(store.root)
            store.write(store.root / "part-00000.parquet", b"too late")
    assert not (store.root / "part-00000.parquet").exists()
    assert not (store.own / "run.log").exists()


def test_a_holder_that_has_died_on_this_machine_is_followed_at_once(store: RemoteStore) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    lease = RemoteLease(store, never)
    with lease:
        text = lease_path(store.root).read_bytes()
    text = text.replace(f'"pid": {os.getpid()}'.encode(), f'"pid": {gone.pid}'.encode())
    store.put(lease_path(store.root), text)
    began_s = time.monotonic()
    with lease_of(RemoteStore(store.root), never):
        assert time.monotonic() - began_s < 10.0


def test_a_damaged_lease_is_no_lease(store: RemoteStore) -> None:
    for data in (b"", b"[1]", b"{", b'{"host": 3}'):
        store.put(lease_path(store.root), data)
        assert not is_held(store.root)
        with lease_of(RemoteStore(store.root), never):
            pass


def test_the_lease_follows_the_place(tmp_path: Path, store: RemoteStore) -> None:
    assert type(lease_of(Store(tmp_path), never)) is Lease
    assert type(lease_of(store, never)) is RemoteLease


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "in.parquet", sample_texts(40)))


def test_a_refused_run_leaves_nothing_in_the_store(source: str) -> None:
    with pytest.raises(JobError, match="no column nothing"):
        run_remote(source, URL, None, input={"columns": ["nothing"]})
    assert not place_of(URL).exists()


def test_begin_anew_takes_only_what_is_ours(source: str) -> None:
    run_remote(source, URL, ScriptedEngine())
    root = place_of(URL)
    RemoteStore(root).put(root / "mine.txt", b"mine")
    summary = run_remote(source, URL, ScriptedEngine(), wishes={"fresh": True})
    assert (summary.exit_code, summary.rows_this_run) == (0, 40)
    assert (root / "mine.txt").read_bytes() == b"mine"
    assert len([path for path in files_in(root / "_batchmla") if "parts." in path.name]) == 1
    assert read_status(root).parts == 2


def test_a_foreign_part_and_a_changed_input_are_refused(source: str) -> None:
    run_remote(source, URL, ScriptedEngine(), wishes={"limit": 30})
    root = place_of(URL)
    RemoteStore(root).put(root / "part-00007.parquet", b"not ours")
    with pytest.raises(JobError, match=rf"{URL}/part-00007\.parquet was not written by this job"):
        run_remote(source, URL, None)
    RemoteStore(root).remove(root / "part-00007.parquet")
    write_rows(Path(source), ["else"] * 40)
    with pytest.raises(JobError, match=r"was begun with another job:\n  input file in\.parquet"):
        run_remote(source, URL, None)


def test_a_lost_part_is_written_again(source: str) -> None:
    run_remote(source, URL, ScriptedEngine())
    root = place_of(URL)
    whole = (root / "part-00000.parquet").read_bytes()
    RemoteStore(root).remove(root / "part-00000.parquet")
    summary = run_remote(source, URL, ScriptedEngine())
    assert (summary.exit_code, summary.rows_this_run) == (0, 25)
    assert (root / "part-00000.parquet").read_bytes() == whole


def test_failed_rows_are_tried_again_in_the_store(tmp_path: Path) -> None:
    texts = [*sample_texts(30), "poison", "poison"]
    source = str(write_rows(tmp_path / "in.parquet", texts))
    errors: dict[str, Any] = {"errors": {"max": 5}}
    first = run_remote(source, URL, ScriptedEngine(), **errors)
    assert (first.exit_code, first.failed) == (0, 2)
    again = run_remote(source, URL, ScriptedEngine(), wishes={"retry_failed": True}, **errors)
    assert (again.rows_this_run, again.failed) == (2, 2)
