"""Splits of a hub that are read where they lie: the files of one commit, over loopback."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import HubServer

pytest.importorskip("datasets")

SUPPORT = Path(__file__).parent.parent / "support"
URL = "hf://someone/toy?split=train&streaming=true"
Ask = Callable[..., dict[str, Any]]


def shard(first: int, last: int) -> bytes:
    sink = io.BytesIO()
    texts = [f"text {n}" for n in range(first, last)]
    table = pa.table({"id": [f"r{n}" for n in range(first, last)], "text": texts, "n": texts})
    pq.write_table(table, sink)
    return sink.getvalue()


FILES = {
    "data/train-00000-of-00002.parquet": shard(0, 7),
    "data/train-00001-of-00002.parquet": shard(7, 12),
    "data/test-00000-of-00001.parquet": shard(100, 103),
}


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    found = HubServer("someone/toy", dict(FILES))
    yield found
    found.close()


@pytest.fixture
def hub(server: HubServer) -> HubServer:
    server.files = dict(FILES)
    return server


@pytest.fixture(scope="module")
def ask(server: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A reader that knows no other hub."""
    cache = str(tmp_path_factory.mktemp("hub"))
    process = subprocess.Popen(
        [sys.executable, str(SUPPORT / "hub_reader.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **server.environment(cache)},
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def asked(**wishes: Any) -> dict[str, Any]:
        stdin.write(json.dumps(wishes) + "\n")
        stdin.flush()
        found: dict[str, Any] = json.loads(stdout.readline())
        return found

    yield asked
    stdin.close()
    process.wait(10)


def test_a_split_is_read_where_it_lies(hub: HubServer, ask: Ask) -> None:
    found = ask(url=URL)
    root = f"hf://datasets/someone/toy@{hub.commit}"
    assert found["files"] == [
        [f"{root}/data/train-00000-of-00002.parquet", "data/train-00000-of-00002.parquet", 7],
        [f"{root}/data/train-00001-of-00002.parquet", "data/train-00001-of-00002.parquet", 5],
    ]
    assert [row[0] for row in found["rows"]] == [f"r{n}" for n in range(12)]
    assert found["rows"][3][1] == {"id": "r3", "text": "text 3", "n": "text 3"}
    assert found["carried"] == 7 and found["schema"] == ["id", "text", "n"]
    assert not any("test-00000" in name for name in hub.asked)


def test_files_are_known_by_their_content_whatever_the_commit(hub: HubServer, ask: Ask) -> None:
    before = ask(url=URL)
    hub.files["more.txt"] = b"something else was added"
    again = ask(url=URL)
    assert again["files"] != before["files"] and again["fingerprint"] == before["fingerprint"]
    hub.files["data/train-00001-of-00002.parquet"] = shard(20, 25)
    changed = ask(url=URL)["fingerprint"]
    assert changed.keys() == before["fingerprint"].keys() and changed != before["fingerprint"]


def test_a_job_over_a_split_goes_on_where_it_was(hub: HubServer, ask: Ask, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    assert ask(url=URL, output=output, limit=9) == {"code": 0, "rows": 9, "done": 9}
    hub.files["README.txt"] = b"another commit"
    assert ask(url=URL, output=output) == {"code": 0, "rows": 3, "done": 12}
    ids = pa.concat_tables(pq.read_table(path) for path in sorted((tmp_path / "out").glob("p*")))
    assert ids.column("row_id").to_pylist() == [f"r{n}" for n in range(12)]
    hub.files["data/train-00000-of-00002.parquet"] = shard(50, 57)
    refused = ask(url=URL, output=output)
    assert refused["code"] == 2 and "data/train-00000-of-00002.parquet" in refused["error"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hf://someone/toy?streaming=true", "name one with ?split="),
        ("hf://someone/toy?split=dev&streaming=true", "has no split dev; it has"),
        ("hf://someone/other?split=train&streaming=true", "cannot be loaded"),
        ("hf://someone/toy?split=train&streaming=yes", "streaming is true or false"),
    ],
)
def test_what_cannot_be_read_there_is_said(hub: HubServer, ask: Ask, url: str, said: str) -> None:
    found = ask(url=url)
    assert found["code"] == 2 and said in found["error"] and url in found["error"]


def test_other_files_than_parquet_are_left_to_the_library(hub: HubServer, ask: Ask) -> None:
    hub.files.clear()
    hub.files["train.csv"] = b"id,text\n1,x\n"
    found = ask(url=URL)
    assert found["code"] == 2 and "only Parquet is read from a hub" in found["error"]
