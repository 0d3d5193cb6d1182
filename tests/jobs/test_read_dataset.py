"""Hugging Face data sets as input: saved folders, splits, ids in the cache, a missing extra."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmla.errors import JobError
from batchmla.jobs.read import InputTable, open_input
from batchmla.jobs.row import Row
from batchmla.jobs.settings import InputSettings
from batchmla.jobs.unbuilt import unbuilt_faults

SCHEMA = pa.schema(
    [("id", pa.string()), ("n", pa.int64()), ("tags", pa.list_(pa.string()))],
    metadata={b"huggingface": b'{"info": {"features": {}}}'},
)


def table(path: Path | str, **settings: Any) -> InputTable:
    return open_input(InputSettings(path=str(path), **settings))


def all_rows(source: InputTable, start: int = 0) -> list[Row]:
    return [row for batch in source.rows(start) for row in batch]


def save(folder: Path, shards: list[range], **state: Any) -> Path:
    """A folder as save_to_disk writes it, with batches of 3 rows."""
    folder.mkdir(parents=True)
    names = [f"data-{place:05d}-of-{len(shards):05d}.arrow" for place in range(len(shards))]
    for name, numbers in zip(names, shards, strict=True):
        with pa.ipc.new_stream(folder / name, SCHEMA) as stream:
            rows = [{"id": f"r{n}", "n": n, "tags": ["x"] * (n % 2)} for n in numbers]
            stream.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), max_chunksize=3)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_data_set_is_read_shard_by_shard(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [range(7), range(7, 12), range(0)])
    source = table(folder)
    assert [file.name for file in source.files] == [
        f"data-0000{place}-of-00003.arrow" for place in range(3)
    ]
    assert source.scan().num_rows == 12 and source.id_column == "id"
    rows = all_rows(source)
    assert [row.id for row in rows] == [f"r{n}" for n in range(12)]
    assert [(row.file, row.number) for row in rows[6:8]] == [(0, 6), (1, 0)]
    assert all_rows(source, start=5) == rows[5:]
    assert source.carried == SCHEMA and source.carried.metadata == SCHEMA.metadata
    carried = pa.Table.from_batches(source.carried_batches(5), source.carried)
    assert carried.column("n").to_pylist() == list(range(5, 12))
    assert carried.column("tags").to_pylist() == [["x"] * (n % 2) for n in range(5, 12)]


def test_the_package_reads_and_writes_the_same_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"id": ["b", "a", "c"], "label": [1, 0, 1]})
    made = made.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    made.sort("id").save_to_disk(tmp_path / "one", num_shards=2)
    source = table(tmp_path / "one", format="dataset")
    assert [row.values for row in all_rows(source)] == [
        {"id": "a", "label": 0}, {"id": "b", "label": 1}, {"id": "c", "label": 1}
    ]  # fmt: skip
    assert b"ClassLabel" in source.carried.metadata[b"huggingface"]


def test_a_split_is_named_unless_there_is_one(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / "dict" / split, [range(4)])
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(JobError, match=r"holds the splits train, test; name one, such as .*train"):
        table(tmp_path / "dict")
    assert table(tmp_path / "dict" / "test").num_rows == 4
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert table(tmp_path / "dict").num_rows == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "jsonl"}, "is a data set, not JSONL; set input.format: dataset"),
        (
            {"path": "plain", "format": "dataset"},
            "plain is no data set; name a folder that",
        ),
        ({"path": "hf://a/b/c"}, "this is no id of a data set; write it as hf://NAMESPACE/NAME"),
        ({"path": "hf://a/b?shuffle=1"}, "the option shuffle is not known"),
        ({"path": "hf://a/b?streaming=1"}, "streaming is true or false"),
    ],
)
def test_what_is_no_data_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "saved", [range(2)])
    (tmp_path / "plain").mkdir()
    with pytest.raises(JobError, match=r"input\.path") as caught:
        open_input(InputSettings.model_validate({"path": "saved", **settings}))
    assert said in str(caught.value)


def test_damage_names_the_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [range(90)])
    shard = folder / "data-00000-of-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-400])
    with pytest.raises(JobError, match=r"00001\.arrow cannot be read as Arrow"):
        table(folder)
    shard.unlink()
    with pytest.raises(JobError, match=r"00001\.arrow cannot be read"):
        table(folder)
    again = save(tmp_path / "order", [range(2)], _indices_data_files=[{"filename": "i.arrow"}])
    with pytest.raises(JobError, match=r"flatten_indices\(\) before save_to_disk"):
        table(again)


def test_an_id_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(JobError) as caught:
        table("hf://someone/toy")
    assert str(caught.value) == (
        "input.path hf://someone/toy needs the package datasets; install batchmla[datasets]"
    )
    assert not list(unbuilt_faults({"input": {"path": "hf://someone/toy"}}))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the data set someone/toy, and no way to anywhere else."""
    datasets = pytest.importorskip("datasets")
    constants = pytest.importorskip("huggingface_hub.constants")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "toy").mkdir()
    made = datasets.Dataset.from_dict({"id": ["a", "b"], "text": ["x", "y"]})
    for split in ("train", "test"):
        made.to_parquet(tmp_path / "toy" / f"{split}.parquet")
    datasets.load_dataset(str(tmp_path / "toy"))
    (tmp_path / "cache" / "toy").rename(tmp_path / "cache" / "someone___toy")
    return tmp_path


def test_an_id_is_found_in_the_local_cache(cache: Path) -> None:
    for path in ("hf://someone/toy?split=train", "hf://datasets/someone/toy?split=test"):
        source = table(path)
        assert source.scan().num_rows == 2
        assert [row.values["text"] for row in all_rows(source)] == ["x", "y"]
        assert source.fingerprint()
    for path, said in (
        ("hf://someone/toy", r"has the splits \w+, \w+; name one with \?split="),
        ("hf://someone/toy?split=dev", r"cannot be loaded: Unknown split"),
        ("hf://someone/other", r"hf://someone/other cannot be loaded: "),
    ):
        with pytest.raises(JobError, match=said):
            table(path)


def test_types_that_parquet_lacks_are_carried_as_what_it_has(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [range(1)])
    columns = {
        "id": pa.array(["a", "b"]),
        "seconds": pa.array([5, None], pa.timestamp("s", "UTC")),
        "empty": pa.array([{}, None], pa.struct([])),
        "inside": pa.array([[{"x": {}}], None], pa.list_(pa.struct([("x", pa.struct([]))]))),
    }
    made = pa.table(columns)
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", made.schema) as stream:
        stream.write_table(made)
    source = table(folder)
    source.scan()
    assert source.carried.field("seconds").type == pa.timestamp("ms", "UTC")
    carried = pa.Table.from_batches(source.carried_batches(), source.carried)
    assert carried.column("seconds").cast(pa.int64()).to_pylist() == [5000, None]
    assert carried.column("empty").to_pylist() == ["{}", None]
    assert carried.column("inside").to_pylist() == ['[{"x": {}}]', None]
    pq.write_table(carried, tmp_path / "out.parquet")
