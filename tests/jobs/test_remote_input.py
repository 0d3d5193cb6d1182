"""Input from a store: which objects a path means, what they are called, how they are read."""

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmla.errors import JobError
from batchmla.jobs.read import InputTable, open_input
from batchmla.jobs.remote_calls import filesystem
from batchmla.jobs.remote_input import reads_object
from batchmla.jobs.settings import InputSettings

IN = "memory://bucket/in"


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    system = fsspec.filesystem("memory")
    yield
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def put(url: str, data: bytes) -> None:
    filesystem(url).pipe_file(url, data)


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parquet(*texts: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), sink)
    return sink.getvalue()


def table(*paths: str, **settings: str) -> InputTable:
    found = open_input(InputSettings(path=paths, **settings))
    found.scan()
    return found


def texts(found: InputTable) -> list[str]:
    return [row.values["text"] for batch in found.rows() for row in batch]


def ids(found: InputTable) -> list[str]:
    return [row.id for batch in found.rows() for row in batch]


def test_fc_033_a_prefix_is_read_like_a_folder(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for name in ("b/2.jsonl", "a.jsonl", "b/10.jsonl"):
        put(f"{IN}/{name}", jsonl(name))
    for name in ("_SUCCESS", ".a.jsonl.tmp", "_old/x.jsonl", ".hidden/y.jsonl", "notes.txt"):
        put(f"{IN}/{name}", jsonl("stray"))
    put(f"{IN}/empty.jsonl", b"")
    put("memory://bucket/inner/z.jsonl", jsonl("another prefix"))
    for path in (IN, f"{IN}/"):
        found = table(path)
        assert texts(found) == ["a.jsonl", "b/10.jsonl", "b/2.jsonl"]
        assert ids(found) == ["a.jsonl:0", "b/10.jsonl:0", "b/2.jsonl:0"]
    assert "3 files ignored" in caplog.text and "notes.txt" in caplog.text
    assert texts(table(f"{IN}/*.jsonl")) == ["a.jsonl"]
    found = table(f"{IN}/**/*.jsonl")
    assert ids(found) == ["_old/x.jsonl:0", "a.jsonl:0", "b/10.jsonl:0", "b/2.jsonl:0"]
    assert texts(table(f"{IN}/b*")) == ["b/10.jsonl", "b/2.jsonl"]
    assert texts(table(f"{IN}/notes.txt", format="jsonl")) == ["stray"]


def test_every_form_of_a_file_is_read_from_the_store() -> None:
    made = {
        "p.parquet": parquet("x", "y"),
        "j.jsonl": b"\xef\xbb\xbf" + jsonl("x", "y").replace(b"\n", b"\r\n"),
        "g.jsonl.gz": gzip.compress(jsonl("x", "y")),
        "z.jsonl.zst": pa.compress(jsonl("x", "y"), codec="zstd", asbytes=True),
        "c.csv": b"text,n\nx,1\ny,2\n",
    }
    for name, data in made.items():
        put(f"{IN}/{name}", data)
        found = table(f"{IN}/{name}")
        assert texts(found) == ["x", "y"] and ids(found) == [f"{name}:0", f"{name}:1"]
        carried = pa.Table.from_batches(found.carried_batches(0))
        assert carried.column("text").to_pylist() == ["x", "y"]
        assert found.num_rows == 2
    body = {"messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    put(f"{IN}/batch.jsonl", json.dumps(line).encode())
    batch = open_input(InputSettings(path=f"{IN}/batch.jsonl"), has_prompt=False)
    batch.scan()
    assert ids(batch) == ["r1"]


def test_places_are_named_by_what_they_have_in_common(tmp_path: Path) -> None:
    put("memory://bucket/one/a.jsonl", jsonl("1"))
    put("memory://bucket/two/a.jsonl", jsonl("2"))
    found = table("memory://bucket/two", "memory://bucket/one/*.jsonl")
    assert ids(found) == ["two/a.jsonl:0", "one/a.jsonl:0"]
    (tmp_path / "a.jsonl").write_bytes(jsonl("3"))
    mixed = table(str(tmp_path), "memory://bucket/one")
    assert ids(mixed) == ["a.jsonl:0", "memory://bucket/one/a.jsonl:0"]
    assert ids(table(f"file://{tmp_path}/a.jsonl")) == ["a.jsonl:0"]


def test_an_object_named_twice_is_read_once(caplog: pytest.LogCaptureFixture) -> None:
    put(f"{IN}/a.jsonl", jsonl("1"))
    assert texts(table(IN, f"{IN}/a.jsonl", f"{IN}/*.jsonl")) == ["1"]
    assert "named twice, read once" not in caplog.text  # as for local files: the same path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("memory://bucket/none", "does not exist: no object has that name or prefix"),
        ("memory://bucket/in/*.csv", "holds no Parquet, JSONL or CSV file"),
        ("memory://bucket/in/cut.parquet", "cannot be read as Parquet: .*; write it again"),
        ("memory://bucket/in/text.parquet", "is not Parquet: it holds text; name it by what"),
        ("memory://bucket/in/half.jsonl.gz", "is cut short or damaged after 0 rows"),
        ("memory://*/in", "name the bucket without a pattern"),
        ("foo://bucket/in", "no store is known by foo://"),
    ],
)
def test_what_is_wrong_with_an_input_is_named(path: str, words: str) -> None:
    put(f"{IN}/cut.parquet", parquet("x" * 999)[:-20])
    put(f"{IN}/text.parquet", jsonl("x"))
    put(f"{IN}/half.jsonl.gz", gzip.compress(jsonl("x" * 999))[:20])
    with pytest.raises(JobError, match=words) as caught:
        table(path)
    assert "\n" not in str(caught.value) and path.split("/in")[0] in str(caught.value)


def test_a_data_set_folder_has_to_be_local() -> None:
    with pytest.raises(JobError, match="is no data set; name a folder that save_to_disk"):
        table(IN, format="dataset")


@pytest.mark.parametrize(
    ("entry", "is_read"),
    [
        ("s3://b/out", True),
        ("s3://b/out/", True),
        ("s3://b", True),
        ("s3a://b/out", True),
        ("s3://b/out/part-00000.parquet", True),
        ("s3://b/o*/*.parquet", True),
        ("s3://b/o*", True),
        ("s3://b/**", True),
        ("s3://b/other", False),
        ("s3://b/ou", False),
        ("s3://b/out/x", False),
        ("s3://c/out", False),
        ("gs://b/out", False),
        ("s3://b/*.parquet", False),
    ],
)
def test_fc_153_which_entries_would_read_the_output(entry: str, is_read: bool) -> None:
    assert reads_object(entry, "s3://b/out/part-00000.parquet") is is_read


def test_fc_153_an_output_within_the_input_is_refused() -> None:
    put(f"{IN}/a.parquet", parquet("x"))
    settings = InputSettings(path=IN)
    with pytest.raises(JobError, match=f"output.path {IN}/out lies within input.path {IN}: the"):
        open_input(settings, output=f"{IN}/out")
    open_input(settings, output="memory://bucket/out")
    open_input(settings, output=f"{IN}/_out")
    open_input(settings, output=f"{IN}/out", part="part-00000.txt")
    open_input(settings, output="out")


def test_an_input_is_known_by_size_and_tag_and_not_read_for_it() -> None:
    put(f"{IN}/a.jsonl", jsonl("1"))
    first = table(IN).fingerprint()
    assert list(first) == ["a.jsonl"] and first["a.jsonl"].startswith("file 1, 14 bytes, modified")
    assert table(IN).fingerprint() == first
    put(f"{IN}/a.jsonl", jsonl("2"))
    assert table(IN).fingerprint() != first
