"""Parquet input: types untouched, schemas of many files, ids, where reading may start."""

import datetime
import math
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmla.errors import JobError
from batchmla.jobs.read import InputTable, open_input
from batchmla.jobs.row import Row
from batchmla.jobs.settings import InputSettings


def put(
    folder: Path, content: pa.Table | dict[str, Any], name: str = "in.parquet", **how: Any
) -> Path:
    path = folder / name
    pq.write_table(content if isinstance(content, pa.Table) else pa.table(content), path, **how)
    return path


def table(path: Path, malformed: Literal["fail", "row"] = "fail", **settings: Any) -> InputTable:
    return open_input(InputSettings(path=str(path), **settings), malformed=malformed)


def all_rows(source: InputTable, start: int = 0, limit: int | None = None) -> list[Row]:
    return [row for batch in source.rows(start, limit) for row in batch]


def carried(source: InputTable, start: int = 0) -> pa.Table:
    return pa.Table.from_batches(source.carried_batches(start), source.carried)


def typed_table() -> pa.Table:
    fields = [
        pa.field("id", pa.int64(), nullable=False, metadata={"unit": "none"}),
        pa.field("ts", pa.timestamp("us", "Europe/Berlin")),
        pa.field("ns", pa.timestamp("ns")),
        pa.field("day", pa.date32()),
        pa.field("price", pa.decimal128(12, 4)),
        pa.field("u64", pa.uint64()),
        pa.field("f16", pa.float16()),
        pa.field("dur", pa.duration("ns")),
        pa.field("label", pa.dictionary(pa.int8(), pa.string())),
        pa.field("big", pa.large_string()),
        pa.field("view", pa.string_view()),
        pa.field("map", pa.map_(pa.string(), pa.int32())),
        pa.field("nested", pa.list_(pa.struct([("a", pa.list_(pa.int64())), ("b", pa.float64())]))),
        pa.field("nest_ns", pa.list_(pa.timestamp("ns"))),
        pa.field("bin", pa.binary()),
        pa.field("nothing", pa.null()),
        pa.field("fixed", pa.list_(pa.float32(), 2)),
    ]
    when = datetime.datetime(2026, 3, 29, 1, 30, tzinfo=datetime.UTC)
    row: dict[str, Any] = {
        "id": 1, "ts": when, "ns": 1_700_000_000_123_456_789, "day": datetime.date(2026, 2, 28),
        "price": Decimal("123.4500"), "u64": 2**63 + 5, "f16": 1.5, "dur": 1_001, "label": "x",
        "big": "large", "view": "seen", "map": [("k", 1)], "nested": [{"a": [1, None], "b": 0.5}],
        "nest_ns": [1_001], "bin": b"\xff\xfe", "nothing": None, "fixed": [1.0, 2.0],
    }  # fmt: skip
    empty = dict.fromkeys(row) | {"id": 2}
    arrays = [pa.array([row[f.name], empty[f.name]], f.type) for f in fields]
    schema = pa.schema(fields, metadata={"origin": "a test"})
    return pa.Table.from_arrays(arrays, schema=schema)


def test_carried_columns_keep_types_values_and_metadata(tmp_path: Path) -> None:
    made = typed_table()
    path = put(tmp_path, made)
    stored = pq.read_table(path)
    source = table(path)
    source.scan()
    assert source.carried.equals(stored.schema, check_metadata=True)
    assert source.carried.field("id").metadata[b"unit"] == b"none"
    assert carried(source).equals(stored)
    assert carried(source, 1).equals(stored.slice(1))


def test_values_are_plain_python_objects(tmp_path: Path) -> None:
    rows = all_rows(table(put(tmp_path, typed_table())))
    values = rows[0].values
    assert rows[0].error is None
    assert values["ts"].isoformat() == "2026-03-29T03:30:00+02:00"
    assert values["ns"].microsecond == 123_456  # nanoseconds end at microseconds in prompts
    assert values["map"] == {"k": 1}
    assert values["nested"] == [{"a": [1, None], "b": 0.5}]
    assert values["nest_ns"] == [datetime.datetime(1970, 1, 1, 0, 0, 0, 1)]
    assert (values["label"], values["view"], values["u64"]) == ("x", "seen", 2**63 + 5)
    assert (values["price"], values["fixed"]) == (Decimal("123.4500"), [1.0, 2.0])
    assert all(value is None for name, value in rows[1].values.items() if name != "id")


def test_nan_stays_a_number(tmp_path: Path) -> None:
    rows = all_rows(table(put(tmp_path, {"id": ["a"], "p": [float("nan")]})))
    assert math.isnan(rows[0].values["p"])


def test_a_value_without_a_python_form_fails_its_row_only(tmp_path: Path) -> None:
    far = pa.array([0, 10**18, 0], pa.timestamp("us"))
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    bad = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"ab\xff")])
    path = put(
        tmp_path, pa.table({"id": [1, 2, 3], "far": far, "bad": bad, "fine": ["x", "y", "z"]})
    )
    source = table(path)
    source.scan()
    errors = [row.error for row in all_rows(source)]
    assert errors[0] is None
    assert "column far" in str(errors[1])
    assert "column bad" in str(errors[2])
    source.select(["fine"])
    assert [row.error for row in all_rows(source)] == [None] * 3
    assert carried(source).column("far").equals(pa.chunked_array([far]))


@pytest.mark.parametrize(
    ("ids", "typed"),
    [
        (pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
        (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
        (pa.array(["a", "b"], pa.string_view()), ["a", "b"]),
        (pa.array([7, 2**64 - 1], pa.uint64()), [7, 2**64 - 1]),
        (pa.array([-7, 8], pa.int8()), [-7, 8]),
    ],
)
def test_ids_may_be_any_text_or_whole_number(
    tmp_path: Path, ids: pa.Array, typed: list[Any]
) -> None:
    source = table(put(tmp_path, pa.table({"key": ids, "x": [1, 2]})), id="key")
    source.scan()
    source.select(["x"])
    rows = all_rows(source)
    assert [(row.typed_id, row.id, row.values) for row in rows] == [
        (typed[0], str(typed[0]), {"x": 1}),
        (typed[1], str(typed[1]), {"x": 2}),
    ]


@pytest.mark.parametrize(
    "ids", [pa.array([1.0, None]), pa.array([b"a", b"b"]), pa.array([[1], [2]])]
)
def test_other_ids_are_refused_when_opened(tmp_path: Path, ids: pa.Array) -> None:
    with pytest.raises(JobError, match=r"the id column id is .*; ids are text or whole numbers"):
        table(put(tmp_path, pa.table({"id": ids})))


def test_null_ids_are_malformed(tmp_path: Path) -> None:
    path = put(tmp_path, {"id": ["a", None, "c", None], "x": [1, 2, 3, 4]})
    with pytest.raises(JobError) as caught:
        table(path).scan()
    assert "the input has 2 malformed rows" in str(caught.value)
    assert "in.parquet, row 1 (counted from 0): the id column id is null" in str(caught.value)
    with pytest.raises(JobError, match="2 malformed rows"):
        all_rows(table(path))
    source = table(path, "row")
    assert source.scan().malformed_rows == 2
    assert [row.id for row in all_rows(source)] == ["a", "in.parquet:1", "c", "in.parquet:3"]
    assert [row.error is None for row in all_rows(source)] == [True, False, True, False]
    assert carried(source).column("x").to_pylist() == [1, 2, 3, 4]


def test_repeated_ids_name_both_places(tmp_path: Path) -> None:
    put(tmp_path, {"id": list(range(10_000))}, "a.parquet", row_group_size=999)
    put(tmp_path, {"id": [50_000, 9_999, 50_000]}, "b.parquet")
    with pytest.raises(JobError) as caught:
        table(tmp_path).scan()
    said = str(caught.value)
    assert "the input has 2 repeated ids" in said
    assert "b.parquet, row 1 (counted from 0): the id 9999 was already used at" in said
    assert "a.parquet, row 9999" in said
    assert "b.parquet, row 2 (counted from 0): the id 50000" in said


@pytest.mark.parametrize("start", [0, 1, 99, 100, 249, 250, 251, 400, 499, 500, 600])
def test_reading_may_start_anywhere(tmp_path: Path, start: int) -> None:
    put(tmp_path, {"id": list(range(250))}, "a.parquet", row_group_size=100)
    put(tmp_path, {"id": pa.array([], pa.int64())}, "b.parquet")
    put(tmp_path, {"id": list(range(250, 500))}, "c.parquet", row_group_size=7)
    source = table(tmp_path)
    assert [file.num_rows for file in source.files] == [250, 0, 250]
    for scanned in (False, True):
        if scanned:
            assert source.scan().num_rows == 500
        rows = all_rows(source, start)
        assert [row.typed_id for row in rows] == list(range(start, 500))
        assert all(row.index == row.typed_id for row in rows)
        assert all(row.number == row.index - (250 if row.file else 0) for row in rows)
        assert len(all_rows(source, start, 3)) == len(range(start, min(start + 3, 500)))
        assert carried(source, start).column("id").to_pylist() == list(range(start, 500))


def test_wide_rows_come_in_small_batches(tmp_path: Path) -> None:
    path = put(tmp_path, {"id": list(range(64)), "t": [str(n) * 500_000 for n in range(64)]})
    source = table(path)
    assert max(len(batch) for batch in source.rows()) < 40
    source.select(["id"])
    assert [len(batch) for batch in source.rows()] == [64]


def test_rows_without_any_column_are_still_rows(tmp_path: Path) -> None:
    source = table(put(tmp_path, {"x": [1, 2, 3]}), columns=[])
    source.select([])
    assert [row.id for row in all_rows(source)] == [f"in.parquet:{n}" for n in range(3)]
    assert sum(batch.num_rows for batch in source.carried_batches()) == 3


def test_schemas_of_many_files_become_one(tmp_path: Path) -> None:
    struct = pa.struct([("lang", pa.string())])
    wider = pa.struct([("lang", pa.string()), ("n", pa.int64())])
    put(
        tmp_path,
        {"id": pa.array(["a"]), "m": pa.nulls(1), "n": pa.array([1], pa.int32())},
        "0.parquet",
    )
    second = {
        "id": pa.array(["b"], pa.large_string()),
        "m": pa.array([{"lang": "en"}], struct),
        "n": pa.array([2**40]),
    }
    put(tmp_path, second, "1.parquet")
    third = {
        "m": pa.array([{"lang": "de", "n": 1}], wider),
        "id": pa.array(["c"]).dictionary_encode(),
        "late": ["x"],
    }
    put(tmp_path, third, "2.parquet")
    source = table(tmp_path)
    source.scan()
    assert source.carried.names == ["id", "m", "n", "late"]
    assert source.carried.field("m").type == wider
    assert source.carried.field("n").type == pa.int64()
    found = carried(source)
    assert found.column("id").to_pylist() == ["a", "b", "c"]
    assert found.column("m").to_pylist() == [
        None,
        {"lang": "en", "n": None},
        {"lang": "de", "n": 1},
    ]
    assert found.column("n").to_pylist() == [1, 2**40, None]
    assert found.column("late").to_pylist() == [None, None, "x"]
    assert all_rows(source)[0].values == {"id": "a", "m": None, "n": 1, "late": None}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array(["x"]), pa.array([1])),
        (pa.array([[1]]), pa.array([[0.5]])),
        (pa.array([1], pa.uint64()), pa.array([1])),
        (pa.array([[1]]), pa.array([["x"]])),
        (pa.array([{"k": 1}]), pa.array([{"k": "x"}])),
        (pa.array([0], pa.timestamp("us", "UTC")), pa.array([0], pa.timestamp("us"))),
    ],
)
def test_a_clash_of_types_names_both_files(
    tmp_path: Path, first: pa.Array, second: pa.Array
) -> None:
    put(tmp_path, {"v": first}, "0.parquet")
    put(tmp_path, {"v": second}, "1.parquet")
    with pytest.raises(JobError, match=r"column v is .* in .*0\.parquet but .* in .*1\.parquet"):
        table(tmp_path)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_whole_numbers_meet_fractions_as_doubles(tmp_path: Path, order: tuple[int, ...]) -> None:
    values = [pa.array([1, 2**53]), pa.array([0.5, None]), pa.array([None, -7])]
    for place in order:
        put(tmp_path, {"v": values[place]}, f"{order.index(place)}.parquet")
    source = table(tmp_path)
    assert source.carried.field("v").type == pa.float64()
    found = carried(source).column("v").to_pylist()
    assert found == [one for place in order for one in values[place].to_pylist()]


def test_whole_numbers_that_no_double_holds_are_refused_before_the_run(tmp_path: Path) -> None:
    put(tmp_path, {"v": [1, 2**53 + 1]}, "0.parquet")
    put(tmp_path, {"v": [0.5]}, "1.parquet")
    with pytest.raises(JobError, match=r"v is int64 in .*0\.parquet with values beyond 2\^53"):
        table(tmp_path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    doubled = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(JobError, match="two columns named x"):
        table(put(tmp_path, doubled))


def test_missing_columns_name_the_nearest(tmp_path: Path) -> None:
    path = put(tmp_path, {"id": [1], "reasoning": ["x"], "text": ["t"]})
    with pytest.raises(JobError, match=r"input\.id: the input has no column idd; did you mean id"):
        table(path, id="idd")
    with pytest.raises(JobError, match=r"input\.columns: .* no column txt; did you mean text"):
        table(path, columns=["txt"])
    source = table(path)
    source.require(["text", "id"], "prompt.user")
    with pytest.raises(
        JobError, match=r"prompt\.user: .* reasoning_content; did you mean reasoning"
    ):
        source.require(["text", "reasoning_content"], "prompt.user")
    with pytest.raises(
        JobError, match=r"prompt\.user: .* no column zzz; it has id, reasoning, text"
    ):
        source.require(["zzz"], "prompt.user")


def test_a_damaged_page_ends_the_read_with_the_files_name(tmp_path: Path) -> None:
    path = put(tmp_path, {"id": list(range(1000)), "t": [f"text {n}" for n in range(1000)]})
    content = bytearray(path.read_bytes())
    content[40:400] = b"\xff" * 360
    path.write_bytes(bytes(content))
    with pytest.raises(JobError, match=r"in\.parquet cannot be read as Parquet"):
        all_rows(table(path))


def test_a_full_check_reads_every_column(tmp_path: Path) -> None:
    texts = [f"text {n}" for n in range(1000)]
    path = put(tmp_path, {"id": list(range(1000)), "t": texts}, use_dictionary=False)
    place = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 300] = b"\xff" * 300
    path.write_bytes(bytes(content))
    assert table(path).scan().num_rows == 1000
    with pytest.raises(JobError, match=r"in\.parquet cannot be read as Parquet"):
        table(path, check="full").scan()


def test_a_file_that_changes_under_the_run_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, {"id": [1, 2]})
    source = table(path)
    source.scan()
    put(tmp_path, {"id": [1, 3, 5]})
    with pytest.raises(JobError, match=r"in\.parquet changed while the job ran"):
        carried(source)
    path.unlink()
    with pytest.raises(JobError, match=r"in\.parquet is gone"):
        all_rows(source)
