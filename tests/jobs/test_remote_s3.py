"""Jobs from S3 into S3, over loopback: as good as local ones, whatever the store does meanwhile."""

import io
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from remote_job import QUICK, KilledJobs, run_remote
from s3_server import FAULTS, Chaos, Fault, S3Server, no_faults
from scripted import ScriptedEngine, sample_texts

from batchmla.errors import JobError, StorageError
from batchmla.jobs.read import open_input
from batchmla.jobs.remote import RemotePath, place_of
from batchmla.jobs.remote_calls import Patience, filesystem
from batchmla.jobs.remote_store import RemoteStore
from batchmla.jobs.settings import InputSettings
from batchmla.jobs.status import read_status
from batchmla.jobs.store import Store

pytest.importorskip("s3fs")
NUM_ROWS = 60
IN = "s3://bucket/in"
SEGMENTS = "_batchmla/segments"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    found = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment().items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)
        found.make_bucket("bucket")
        for name, first, last in (("a", 0, 20), ("b", 20, NUM_ROWS)):
            put(f"{IN}/{name}.parquet", parquet(rows(first, last)))
        yield found
    found.close()


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    """The server without faults, before and after a test."""
    server.proxy.plan = no_faults
    server.proxy.struck.clear()
    yield server
    server.proxy.plan = no_faults


@pytest.fixture(scope="module")
def killed(server: S3Server) -> Iterator[KilledJobs]:
    jobs = KilledJobs()
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def good(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    """The parts of the same job on the local disk."""
    folder = tmp_path_factory.mktemp("local")
    for name, first, last in (("a", 0, 20), ("b", 20, NUM_ROWS)):
        (folder / "in").mkdir(exist_ok=True)
        (folder / "in" / f"{name}.parquet").write_bytes(parquet(rows(first, last)))
    output = folder / "out"
    run_remote(str(folder / "in"), str(output), ScriptedEngine(), Store)
    return {path.name: pq.read_table(path) for path in sorted(output.glob("part-*"))}


def rows(first: int, last: int) -> pa.Table:
    texts = sample_texts(NUM_ROWS)[first:last]
    return pa.table({"doc": [f"d{i}" for i in range(first, last)], "text": texts})


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def put(url: str, data: bytes) -> None:
    filesystem(url).pipe_file(url, data)


def parts(output: str) -> dict[str, pa.Table]:
    found = [path for path in RemotePath(output).files() if path.name.startswith("part-")]
    return {path.name: pq.read_table(pa.BufferReader(path.read_bytes())) for path in sorted(found)}


def names(output: str) -> set[str]:
    """What lies in our own folder, without the marks of runs."""
    own = RemotePath(output) / "_batchmla"
    return {path.name if "parts." not in path.name else "parts" for path in own.iterdir()}


def test_a_job_from_s3_into_s3_has_the_rows_of_a_local_one(
    s3: S3Server, good: dict[str, pa.Table], capfd: pytest.CaptureFixture[str]
) -> None:
    output = "s3://bucket/plain/out"
    first = run_remote(IN, output, ScriptedEngine(), wishes={"limit": 30})
    assert (first.exit_code, first.rows_this_run) == (0, 30)
    assert not (RemotePath(output) / "_SUCCESS").exists()
    summary = run_remote(IN, output, ScriptedEngine())
    assert (summary.exit_code, summary.rows_this_run) == (0, NUM_ROWS - 30)
    assert parts(output) == good and summary.output == output
    assert (RemotePath(output) / "_SUCCESS").read_bytes() == b""
    assert names(output) == {
        "manifest.json", "parts", "progress.json", "run.log", "series.jsonl", "summary.json"
    }  # fmt: skip
    status = read_status(Path(output))  # as the command line makes it
    assert (status.is_complete, status.is_running, status.done) == (True, False, NUM_ROWS)
    assert run_remote(IN, output, None).rows_this_run == 0
    log = (RemotePath(output) / "_batchmla" / "run.log").read_bytes().decode()
    assert log.count("rows done, 0 failed") == 2 and "nothing to do" in log
    shown = log + "".join(capfd.readouterr())
    manifest = (RemotePath(output) / "_batchmla" / "manifest.json").read_bytes().decode()
    assert "never-to-be-shown" not in shown + manifest


def test_fc_034_a_store_that_fails_again_and_again_changes_nothing(
    s3: S3Server, good: dict[str, pa.Table]
) -> None:
    output, asked = "s3://bucket/faults", [0]

    def plan(method: str, path: str) -> Fault | None:
        asked[0] += 1
        return FAULTS[asked[0] // 3 % len(FAULTS)] if asked[0] % 3 == 0 else None

    s3.proxy.plan = plan
    summary = run_remote(IN, output, ScriptedEngine())
    s3.proxy.plan = no_faults
    assert all(s3.proxy.struck[fault] >= 3 for fault in FAULTS), s3.proxy.struck
    assert (summary.exit_code, summary.rows_this_run, summary.duplicates) == (0, NUM_ROWS, 0)
    assert parts(output) == good and "lease" not in names(output)


def check_kill(
    killed: KilledJobs, good: dict[str, pa.Table], output: str, kill_at: int, *words: str
) -> str:
    """Kills a job at an effect and goes on with it; returns which effect that was, or ""."""
    where, status = killed.run(IN, output, kill_at, *words)
    assert status == (-9 if where else 0), (kill_at, where, status)
    for name, table in parts(output).items():
        assert table.equals(good[name]), (kill_at, where)
    summary = run_remote(IN, output, ScriptedEngine())
    assert (summary.exit_code, summary.duplicates) == (0, 0), (kill_at, where)
    assert parts(output) == good, (kill_at, where)
    assert not names(output) & {"segments", "lease"}, (kill_at, where)
    return where


def test_kills_at_effects_on_a_store_under_faults_lose_and_double_nothing(
    s3: S3Server, good: dict[str, pa.Table], killed: KilledJobs
) -> None:
    kills = (
        (1, "put part-", "after"),
        (1, "remove 0000", "before"),
    )
    for seed, (kill_at, words, when) in enumerate(kills):
        s3.proxy.plan = Chaos(seed, 0.04)
        output = f"s3://bucket/killed/{seed}"
        assert check_kill(killed, good, output, kill_at, words, when).startswith(words)
    assert s3.proxy.struck.total() > 5


def failing_puts(word: str) -> Callable[[str, str], Fault | None]:
    return lambda method, path: "503" if method == "PUT" and word in path else None


def test_a_store_that_stays_down_ends_the_run_resumably(
    s3: S3Server, good: dict[str, pa.Table]
) -> None:
    output = "s3://bucket/down"
    s3.proxy.plan = failing_puts("part-00002")
    brief = Patience(total_s=0.5, first_wait_s=0.05)
    words = r"part-00002\.parquet: the store does not answer as it should \(.*\), tried \d+ times"
    with pytest.raises(StorageError, match=words) as caught:
        run_remote(IN, output, ScriptedEngine(), lambda root: RemoteStore(root, brief))
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
    assert parts(output) == {name: good[name] for name in sorted(good)[:2]}
    s3.proxy.plan = no_faults
    summary = run_remote(IN, output, ScriptedEngine())
    assert summary.exit_code == 0 and parts(output) == good
    assert summary.rows_this_run <= NUM_ROWS - 50


def test_what_is_wrong_with_a_store_is_said_before_an_engine_is_loaded(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match=r"output\.path: s3://no-such/out .*: there is no such buck"):
        run_remote(IN, "s3://no-such/out", None)
    with pytest.raises(JobError, match=r"input\.path s3://no-such/in cannot be read: there is no"):
        run_remote("s3://no-such/in", "s3://bucket/nothing", None)
    with pytest.raises(JobError, match=r"input\.path s3://bucket/none does not exist: no object"):
        run_remote("s3://bucket/none", "s3://bucket/nothing", None)
    assert not RemotePath("s3://bucket/nothing").exists()
    s3.proxy.plan = lambda method, path: "403" if method == "PUT" else None
    with pytest.raises(StorageError, match=r"cannot write: permission is denied .*credentials"):
        run_remote(IN, "s3://bucket/refused", None)
    s3.proxy.plan = lambda method, path: "403" if method in ("GET", "HEAD") else None
    with pytest.raises(JobError, match=r"input\.path s3://bucket/in.*permission is denied"):
        run_remote(IN, "/nonexistent/never", None, lambda root: RemoteStore(place_of("memory://o")))


def test_of_a_wide_file_only_the_columns_in_use_are_fetched(s3: S3Server) -> None:
    noise = [os.urandom(30_000).hex() for _ in range(NUM_ROWS)]
    table = rows(0, NUM_ROWS).append_column("noise", pa.array(noise))
    data = parquet(table, compression="none")
    put("s3://bucket/wide/w.parquet", data)
    s3.proxy.sent_bytes = 0
    found = open_input(InputSettings(path="s3://bucket/wide", columns=("doc",), id="doc"))
    found.scan()
    got = [row for batch in found.rows(0, None, ["text"]) for row in batch]
    assert [row.id for row in got] == [f"d{i}" for i in range(NUM_ROWS)]
    assert found.fingerprint()["w.parquet"].startswith(f"file 1, {len(data)} bytes, tag ")
    assert s3.proxy.sent_bytes < len(data) / 10


def test_an_object_that_changes_while_it_is_read_is_noticed(s3: S3Server) -> None:
    put("s3://bucket/moving/m.jsonl", b'{"text": "a"}\n')
    table = open_input(InputSettings(path="s3://bucket/moving"))
    table.scan()
    put("s3://bucket/moving/m.jsonl", b'{"text": "b"}\n')
    with pytest.raises(JobError, match=r"m\.jsonl changed while the job ran; run the job again"):
        list(table.carried_batches(0))


def test_nothing_but_warnings_of_ours_reaches_the_console(
    s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    s3.proxy.plan = Chaos(5, 0.2)
    store = RemoteStore(place_of("s3://bucket/said"), QUICK)
    with caplog.at_level(logging.INFO):
        for number in range(10):
            store.put(store.root / f"{number}", b"x" * number)
    assert s3.proxy.struck.total() and "tried again in" in caplog.text
    assert {record.name.split(".")[0] for record in caplog.records} <= {"batchmla", "aiobotocore"}


HANGING = """
import sys
from remote_job import run_remote
from scripted import ScriptedEngine
from batchmla.errors import BatchmlaError
from batchmla.jobs.remote_store import RemoteStore

try:
    engine = ScriptedEngine(max_running=4, delay_s=0.3)
    done = run_remote(sys.argv[1], sys.argv[2], engine, RemoteStore)
    sys.exit(done.exit_code)
except BatchmlaError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_a_signal_ends_a_run_in_time_while_the_store_hangs(
    s3: S3Server, good: dict[str, pa.Table]
) -> None:
    output = "s3://bucket/hang/out"
    support = str(Path(__file__).parent.parent / "support")
    search = os.pathsep.join([support, *filter(None, [os.environ.get("PYTHONPATH")])])
    job = subprocess.Popen(
        [sys.executable, "-P", "-c", HANGING, IN, output],
        env={**os.environ, "PYTHONPATH": search},
        stderr=subprocess.PIPE,
        text=True,
    )
    until_s = time.monotonic() + 60
    while not any(path.name.endswith(".seg") for path in (RemotePath(output) / SEGMENTS).files()):
        assert job.poll() is None and time.monotonic() < until_s
        time.sleep(0.1)
    s3.proxy.plan = lambda method, path: "hang"
    began_s = time.monotonic()
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=30)
    took_s = time.monotonic() - began_s
    s3.proxy.plan = no_faults
    assert job.returncode == 4 and took_s < 10
    assert "the store does not answer" in said and "Traceback" not in said
    assert run_remote(IN, output, ScriptedEngine()).exit_code == 0
    assert parts(output) == good
