"""Field cases of files, formats and schemas: what a folder of files may look like, and becomes."""

import datetime
import gzip
import json
import logging
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from echo_job import EchoEngine, EchoJob
from scripted import ScriptedEngine, sample_texts
from scripted_job import Job

from batchmla.errors import JobError, StorageError
from batchmla.jobs.read import InputTable, open_input
from batchmla.jobs.row import Row
from batchmla.jobs.settings import InputSettings
from batchmla.jobs.store import Store


def put(folder: Path, content: bytes | str, name: str = "in.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table(path: Path | str, **settings: Any) -> InputTable:
    return open_input(InputSettings(path=str(path), **settings))


def all_rows(source: InputTable) -> list[Row]:
    return [row for batch in source.rows() for row in batch]


def carried(source: InputTable) -> pa.Table:
    source.scan()
    return pa.Table.from_batches(source.carried_batches(), source.carried)


WORDS = [{"id": f"r{n:03d}", "prompt": f"Say the word {n}."} for n in range(4)]


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_fc_020_a_byte_order_mark_changes_nothing(tmp_path: Path, name: str) -> None:
    text = lines(*WORDS)
    if name == "in.csv":
        text = "id,prompt\n" + "".join(f"{row['id']},{row['prompt']}\n" for row in WORDS)
    plain = carried(table(put(tmp_path, text, name)))
    marked = carried(table(put(tmp_path, b"\xef\xbb\xbf" + text.encode(), name)))
    assert marked == plain and marked.schema == plain.schema and marked.num_rows == 4


def test_fc_021_only_lf_ends_a_line(tmp_path: Path) -> None:
    texts = ["line sep \u2028 in", "para sep \u2029 in", "next line \x85 in", "vt \x0b ff \f in"]
    rows = [{"id": str(n), "prompt": text} for n, text in enumerate(texts)]
    job = EchoJob(tmp_path, put(tmp_path, lines(*rows)))
    job.run()
    assert job.contents() == texts
    job.run(fresh=True, output={"format": "jsonl"})
    written = (job.output / "part-00000.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["content"] for line in written] == texts


@pytest.mark.parametrize(
    "content",
    [
        b'{"id": "a", "prompt": "one"}\r\n\r\n   \r\n{"id": "b", "prompt": "two"}\r\n',
        b'{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}',
    ],
)
def test_fc_022_line_ends_and_blank_lines(tmp_path: Path, content: bytes) -> None:
    path = put(tmp_path, content)
    rows = all_rows(table(path))
    assert [(row.id, row.number, row.values["prompt"]) for row in rows] == [
        ("a", 0, "one"),
        ("b", 1, "two"),
    ]
    put(tmp_path, content.replace(b'"two"}', b'"two"'))
    line = 4 if b"\r" in content else 2
    with pytest.raises(JobError, match=rf"in\.jsonl:{line}: not valid JSON"):
        table(path).scan()


BROKEN = (
    '{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two",}\n'
    "{'id': 'c', 'prompt': 'three'}\n"
    '{"id": "d", "prompt": "four"\n[1, 2, 3]\n"just a string"\n'
    '{"id": "g", "prompt": "seven"}\n{"id": "h", "id": "h2", "prompt": "key twice"}\n'
)


def test_fc_023_malformed_lines_are_listed_before_the_model_loads(tmp_path: Path) -> None:
    path = put(tmp_path, BROKEN)
    job = EchoJob(tmp_path, path)
    engine = EchoEngine()
    with pytest.raises(JobError) as caught:
        job.run(engine)
    said = str(caught.value)
    assert "the input has 6 malformed rows:" in said and not engine.seen
    for line in (2, 3, 4, 5, 6, 8):
        assert f"{path}:{line}: " in said
    assert ":5: a list, not an object" in said and ':8: the key "id" is given twice' in said
    put(tmp_path, "nonsense\n" * 1000)
    with pytest.raises(JobError, match=r"has 1000 malformed rows:(\n.*){20}\n  and 980 more"):
        job.run()


def test_fc_023_malformed_lines_can_be_error_rows(tmp_path: Path) -> None:
    job = EchoJob(tmp_path, put(tmp_path, BROKEN))
    assert job.run(errors={"malformed": "row"}).failed == 6
    assert job.contents() == ["one", None, None, None, None, None, "seven", None]
    assert all(f"in.jsonl:{n + 1}: " in str(job.errors()[n]) for n in (1, 2, 3, 4, 5, 7))


def test_fc_024_compressed_files_and_a_cut_one(tmp_path: Path) -> None:
    text = lines(*({"id": f"r{n}", "prompt": f"{n * 7919**2:x}"} for n in range(3000))).encode()
    plain = carried(table(put(tmp_path, text)))
    packed = {"gz": gzip.compress(text), "zst": pa.Codec("zstd").compress(text, asbytes=True)}
    for ending, content in packed.items():
        assert carried(table(put(tmp_path, content, f"rows.jsonl.{ending}"))) == plain
        assert carried(table(put(tmp_path, content, "rows.jsonl"))) == plain  # by first bytes
        cut = put(tmp_path, content[: len(content) // 2], f"cut.jsonl.{ending}")
        with pytest.raises(JobError, match=rf"cut\.jsonl\.{ending} is cut short .* \d+ rows: "):
            table(cut).scan()


def test_fc_025_a_null_column_and_structs_become_one_schema(tmp_path: Path) -> None:
    struct = pa.struct([("lang", pa.string()), ("n", pa.int64())])
    wider = pa.struct([*struct, ("extra", pa.list_(pa.float64()))])
    metas = [
        pa.nulls(1),
        pa.array([{"lang": "en", "n": 1}], struct),
        pa.array([{"lang": "de", "n": 2, "extra": [1.5]}], wider),
    ]
    (tmp_path / "in").mkdir()
    for place, meta in enumerate(metas):
        shard = pa.table({"id": [f"r{place}"], "prompt": [f"Say {place}."], "meta": meta})
        pq.write_table(shard, tmp_path / "in" / f"part-{place}.parquet")
    job = EchoJob(tmp_path, tmp_path / "in")
    job.run(output={"rows_per_file": 1})
    assert [row["meta"] for row in job.rows()] == [
        None,
        {"lang": "en", "n": 1, "extra": None},
        {"lang": "de", "n": 2, "extra": [1.5]},
    ]
    for part in job.output.glob("*.parquet"):
        assert pq.read_schema(part).field("meta").type == wider
    pq.write_table(pa.table({"id": ["x"], "meta": ["text"]}), tmp_path / "in" / "part-3.parquet")
    said = r"column meta is struct.* in .*part-2\.parquet but string in .*part-3\.parquet"
    with pytest.raises(JobError, match=said):
        table(tmp_path / "in")


def test_fc_026_a_late_field_is_a_column(tmp_path: Path) -> None:
    late = {"id": "x", "prompt": "Say x.", "symlink_target": "here", "meta": {"k": 1}}
    job = EchoJob(tmp_path, put(tmp_path, lines(*WORDS[:3], late)))
    job.run(output={"rows_per_file": 2})
    assert [row["meta"] for row in job.rows()] == [None, None, None, {"k": 1}]
    assert [row["symlink_target"] for row in job.rows()] == [None, None, None, "here"]
    assert job.errors() == [None] * 4


def test_fc_026_a_column_of_two_types_keeps_its_values(tmp_path: Path) -> None:
    scores = [1, "high", 2.5, None]
    rows = [{**row, "score": score} for row, score in zip(WORDS, scores, strict=True)]
    job = EchoJob(tmp_path, put(tmp_path, lines(*rows)))
    job.run()
    found = [row["score"] for row in job.rows()]
    assert found == ["1", '"high"', "2.5", None]
    assert [one if one is None else json.loads(one) for one in found] == scores


def test_fc_027_our_columns_have_one_schema_in_every_part(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": "" if n == 3 else f"word {n}"} for n in range(4)]
    job = EchoJob(tmp_path, put(tmp_path, lines(*rows)))
    job.run(output={"rows_per_file": 2})
    first, second = (pq.read_schema(part) for part in sorted(job.output.glob("*.parquet")))
    assert first.equals(second, check_metadata=True)
    assert ds.dataset(job.output).to_table().column("error").null_count == 3
    empty = EchoJob(tmp_path / "empty", put(tmp_path, "", "empty.jsonl"))
    empty.run(prompt={"raw": "no columns to name"})
    (part,) = empty.output.glob("*.parquet")
    own = [name for name in first.names if name not in ("id", "prompt")]
    assert pq.read_schema(part).names == own
    for name in own:
        assert pq.read_schema(part).field(name).equals(first.field(name))


def test_fc_028_empty_lists_and_objects_have_the_type_of_the_whole_input(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "one", "tags": [], "meta": {}, "nothing": {}},
        {"id": "b", "prompt": "two", "tags": ["x"], "meta": {"k": 1}, "nothing": {}},
    ]
    job = EchoJob(tmp_path, put(tmp_path, lines(*rows)))
    job.run(output={"rows_per_file": 1})
    found = job.rows()
    assert [row["tags"] for row in found] == [[], ["x"]]
    assert [row["meta"] for row in found] == [{"k": None}, {"k": 1}]
    assert [row["nothing"] for row in found] == ["{}", "{}"]  # text: Parquet has no empty struct


def test_fc_030_typed_columns_are_bit_equal_in_the_output(tmp_path: Path) -> None:
    nested = pa.list_(
        pa.struct([("a", pa.list_(pa.int64())), ("b", pa.struct([("c", pa.string())]))])
    )
    source = pa.table(
        {
            "id": ["a", "b"],
            "prompt": ["Say a.", "Say b."],
            "ts": pa.array([1_774_747_800_000_000, None], pa.timestamp("us", "Europe/Berlin")),
            "ns": pa.array([1, 2], pa.timestamp("ns")),
            "day": pa.array([datetime.date(2026, 2, 28), None]),
            "price": pa.array([Decimal("123.4500"), None], pa.decimal128(12, 4)),
            "u64": pa.array([2**63 + 5, None], pa.uint64()),
            "i64": pa.array([2**53 + 1, None]),
            "f16": pa.array([1.5, None], pa.float16()),
            "dur": pa.array([5, None], pa.duration("s")),
            "nested": pa.array([[{"a": [1, None], "b": {"c": "x"}}], None], nested),
            "mp": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
            "bin": pa.array([b"\xff\xfe", b""]),
            "flag": pa.array([True, None]),
        }
    )
    pq.write_table(source, tmp_path / "in.parquet")
    source = pq.read_table(tmp_path / "in.parquet")
    job = EchoJob(tmp_path, tmp_path / "in.parquet")
    job.run()
    found = pq.read_table(job.output / "part-00000.parquet").select(source.column_names)
    assert found.schema.equals(source.schema, check_metadata=True)
    assert found.equals(source)


def test_fc_033_stray_files_of_a_folder_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for place in (2, 0, 1):
        put(tmp_path / "in", lines({"id": str(place), "prompt": "x"}), f"part-0{place}.jsonl")
    put(tmp_path / "in", "", "part-03.jsonl")  # no rows
    for name in ("_SUCCESS", ".part-04.jsonl.tmp", "notes.txt"):
        put(tmp_path / "in", "not rows\n", name)
    with caplog.at_level(logging.INFO):
        source = table(tmp_path / "in")
    assert [file.name for file in source.files] == [f"part-0{n}.jsonl" for n in range(4)]
    assert source.scan().num_rows == 3
    assert [row.id for row in all_rows(source)] == ["0", "1", "2"]
    assert "3 files ignored" in caplog.text and "notes.txt" in caplog.text
    (tmp_path / "in" / "notes.txt").unlink()
    given = table(tmp_path / "in" / "*", format="jsonl")  # whatever their endings
    assert [file.name for file in given.files] == [file.name for file in source.files]


def test_fc_033_thousands_of_small_files_in_a_stable_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for place in range(2000):
        put(folder, f'{{"id": {place}}}\n', f"{place:05d}.jsonl")
    for path in (folder, folder / "*.jsonl"):
        source = table(path)
        assert source.scan().num_rows == 2000
        assert [row.typed_id for row in all_rows(source)] == list(range(2000))


def test_fc_033_an_unreadable_file_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in range(3):
        put(tmp_path / "in", lines({"id": str(place)}), f"{place}.jsonl")
    (tmp_path / "in" / "1.jsonl").chmod(0)
    if os.geteuid() == 0:  # root may read everything: refuse as the kernel would others
        opened = open

        def refusing(path: Any, *rest: Any, **more: Any) -> Any:
            if str(path).endswith("1.jsonl"):
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, *rest, **more)

        monkeypatch.setattr("builtins.open", refusing)
    with pytest.raises(JobError, match=r"1\.jsonl cannot be read: Permission denied"):
        table(tmp_path / "in")


class FailingStore(Store):
    """Fails one operation on a part, as a disk does that is full for a while."""

    calls = 0
    fail_at = 1

    def publish(self, name: str, target: Path) -> None:
        if name.startswith("part-"):
            type(self).calls += 1
            if type(self).calls == self.fail_at:
                raise StorageError(f"{target}: cannot write: the disk is full")
        super().publish(name, target)


@pytest.mark.parametrize("fail_at", [1, 2, 4])
def test_fc_034_a_store_that_fails_ends_the_run_with_what_is_safe(
    tmp_path: Path, fail_at: int
) -> None:
    class Failing(FailingStore):
        pass

    Failing.fail_at = fail_at
    job = Job(tmp_path, sample_texts(350))
    with pytest.raises(StorageError) as caught:
        job.run(ScriptedEngine(), store=Failing)
    assert caught.value.exit_code == 4 and not job.is_successful
    assert len(job.parts()) == fail_at - 1
    engine = ScriptedEngine()
    assert job.run(engine, store=Failing).exit_code == 0  # the store works again
    assert not set(engine.seen) & set(range(100 * fail_at)), "finished rows were done again"
    assert [row["doc"] for row in job.rows()] == [f"d{n}" for n in range(350)]
