"""One run at a time: who is refused, who is taken over, and what the one taken over finds out."""

import errno
import fcntl
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from job_server import Jobs
from scripted import ScriptedEngine, run_scripted, sample_texts, scripted_seams, scripted_spec
from scripted import write_rows as write_input

from batchmla.errors import JobError
from batchmla.jobs import lease
from batchmla.jobs.lease import Lease, is_held, lease_path
from batchmla.jobs.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.open()
    return store


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_WATCH_S", 0.2)
    monkeypatch.setattr(lease, "_WAIT_S", 0.1)


def fall_silent(output: Path, age_s: float = 100.0) -> None:
    """The holder's last sign of life is `age_s` old."""
    path = lease_path(output)
    said = json.loads(path.read_text())
    with path.open("r+b") as file:
        file.write(json.dumps({**said, "beat_s": time.time() - age_s}).encode().ljust(512))


def test_the_second_run_is_told_who_holds_the_output(store: Store, impatient: None) -> None:
    with (
        Lease(store),
        pytest.raises(
            JobError,
            match=rf"in use by another run \(host \S+, pid {os.getpid()}, seen \d s ago\); wait for"
            r" it or stop it, or choose another output\.path",
        ),
        Lease(Store(store.root)),
    ):
        pass
    assert not is_held(store.root)
    with Lease(Store(store.root)):
        assert is_held(store.root)


def test_the_heartbeat_is_renewed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_BEAT_S", 0.02)
    with Lease(store):
        fall_silent(store.root)
        until_s = time.monotonic() + 10
        while time.time() - json.loads(lease_path(store.root).read_text())["beat_s"] > 50:
            assert time.monotonic() < until_s, "no beat came"
            time.sleep(0.01)
    assert not lease_path(store.root).read_text().strip()


def test_a_silent_holder_is_taken_over_and_writes_no_more(
    store: Store, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    other = Store(store.root)
    other.open()
    with Lease(store):
        store.write(store.root / "before", b"1")
        fall_silent(store.root)
        with Lease(other):
            assert "taken over from a silent run" in caplog.text
            other.write(store.root / "after", b"2")
            for write in (
                lambda: store.write(store.root / "x", b""),
                lambda: store.append(store.own / "parts.jsonl", b"x"),
                lambda: store.remove(store.root / "after"),
            ):
                with pytest.raises(JobError, match="was taken over by another run"):
                    write()
            assert is_held(store.root)
        assert not is_held(store.root)
    assert sorted(path.name for path in store.root.iterdir()) == ["_batchmla", "after", "before"]


def test_a_holder_on_a_host_with_a_slow_clock_is_not_taken_over(
    store: Store, impatient: None
) -> None:
    ended = threading.Event()

    def beat_in_the_past() -> None:
        while not ended.wait(0.02):
            fall_silent(store.root)

    with Lease(store):
        beats = threading.Thread(target=beat_in_the_past)
        beats.start()
        try:
            with pytest.raises(JobError, match="in use"), Lease(Store(store.root)):
                pass
        finally:
            ended.set()
            beats.join()


def test_somebody_who_only_looks_keeps_no_run_from_starting(store: Store) -> None:
    lease_path(store.root).touch()
    looking = os.open(lease_path(store.root), os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.15, os.close, [looking]).start()
    with Lease(store):
        assert is_held(store.root)


def test_without_locks_the_heartbeat_keeps_runs_apart(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(lease, "_WATCH_S", 0.1)
    with Lease(store):
        assert "has no locks" in caplog.text and is_held(store.root)
        with pytest.raises(JobError, match="in use"), Lease(Store(store.root)):
            pass
        fall_silent(store.root)
        assert not is_held(store.root)
        with Lease(Store(store.root)), pytest.raises(JobError, match="taken over"):
            store.write(store.root / "x", b"")
    with Lease(Store(store.root)):
        pass  # an ended run leaves no name


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(write_input(tmp_path_factory.mktemp("zombie") / "in.parquet", sample_texts(360)))
    yield jobs
    jobs.close()


def test_a_stopped_process_that_wakes_up_after_it_was_taken_over(
    jobs: Jobs, tmp_path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    output, source = tmp_path / "out", jobs.source
    jobs.start(output)
    jobs.read("started")
    os.kill(jobs.pid, signal.SIGSTOP)
    try:
        fall_silent(output)
        loaded = scripted_spec(source, output, output={"token_ids": True})
        assert run_scripted(loaded, scripted_seams(ScriptedEngine())).exit_code == 0
        assert "taken over from a silent run" in caplog.text
        before = {path.name: path.read_bytes() for path in output.glob("part-*")}
    finally:
        os.kill(jobs.pid, signal.SIGCONT)
    word, *said = jobs.read("error", "done")
    assert word == "error" and "was taken over by another run" in " ".join(said)
    assert jobs.end() == 1
    assert {path.name: path.read_bytes() for path in output.glob("part-*")} == before
    rows = [row for name in sorted(before) for row in pq.read_table(output / name).to_pylist()]
    assert [row["doc"] for row in rows] == [f"d{i}" for i in range(360)]
    assert jobs.finish(output) == 0
