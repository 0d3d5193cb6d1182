"""Types of carried columns from the input to the output, and who can read them there."""

import datetime
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from scripted import ScriptedEngine, ScriptedText, run_scripted, scripted_seams, scripted_spec

from batchmla.jobs.columns import own_schema
from batchmla.jobs.read import open_job_input

NUM_ROWS = 4  # values, nulls, and values again

TYPES: dict[str, pa.Array] = {
    "large_string": pa.array(["x", None], pa.large_string()),
    "string_view": pa.array(["longer than twelve bytes", None], pa.string_view()),
    "binary": pa.array([b"\xff\0", None]),
    "binary_view": pa.array([b"\xff\0 longer than twelve bytes", None], pa.binary_view()),
    "fixed_binary": pa.array([b"ab", None], pa.binary(2)),
    "dictionary": pa.array(["x", None]).dictionary_encode(),
    "dictionary_int8": pa.array(["x", None]).dictionary_encode().cast(
        pa.dictionary(pa.int8(), pa.string())
    ),
    "null": pa.nulls(2),
    "int8": pa.array([-1, None], pa.int8()),
    "uint64": pa.array([2**64 - 1, None], pa.uint64()),
    "int64": pa.array([2**53 + 1, None]),
    "float16": pa.array([1.5, None], pa.float16()),
    "double": pa.array([float("inf"), None]),
    "bool": pa.array([True, None]),
    "decimal": pa.array([Decimal("123.4500"), None], pa.decimal128(12, 4)),
    "date": pa.array([datetime.date(2026, 2, 28), None]),
    "time": pa.array([datetime.time(1, 2, 3, 4), None], pa.time64("us")),
    "zone": pa.array([1_774_747_800_000_001, None], pa.timestamp("us", "Europe/Berlin")),
    "nanoseconds": pa.array([1_774_747_800_000_000_001, None], pa.timestamp("ns")),
    "duration": pa.array([5, None], pa.duration("s")),
    "list": pa.array([["x", None], None]),
    "large_list": pa.array([[1], None], pa.large_list(pa.int16())),
    "fixed_list": pa.array([[1, 2], None], pa.list_(pa.int8(), 2)),
    "empty_lists": pa.array([[], None], pa.list_(pa.null())),
    "struct": pa.array([{"a": [{"b": Decimal("1.5")}]}, None]),
    "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
}  # fmt: skip


def write_input(path: Path) -> pa.Table:
    """`NUM_ROWS` rows with a column of every type; metadata on the schema and on a field."""
    fields = [pa.field("id", pa.string(), nullable=False, metadata={"note": "key"})]
    fields += [pa.field("text", pa.string())]
    fields += [pa.field(name, array.type) for name, array in TYPES.items()]
    columns: list[Any] = [pa.array([f"r{n}" for n in range(NUM_ROWS)]), pa.array(list("abcd"))]
    columns += [pa.concat_arrays([array, array]) for array in TYPES.values()]
    table = pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata={"owner": "us"}))
    pq.write_table(table, path)
    return pq.read_table(path)


def run(folder: Path, form: str = "parquet", **wishes: Any) -> Path:
    """A job over `in.parquet` into parts of three rows."""
    loaded = scripted_spec(
        folder / "in.parquet",
        folder / "out",
        input={"id": "id"},
        output={"rows_per_file": 3, "format": form},
    )
    seams = replace(scripted_seams(ScriptedEngine(), text=ScriptedText()), table=open_job_input)
    run_scripted(loaded, seams, **wishes)
    return folder / "out"


def test_carried_columns_keep_type_nullability_metadata_and_order(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.parquet")
    run(tmp_path, limit=2)
    out = run(tmp_path)
    parts = sorted(out.glob("*.parquet"))
    assert len(parts) == 2
    schemas = [pq.read_schema(part) for part in parts]
    assert schemas[0].equals(schemas[1], check_metadata=True)
    assert schemas[0].names == [*source.schema.names, *own_schema(False).names]
    for field in source.schema:
        assert schemas[0].field(field.name).equals(field, check_metadata=True), field
    assert schemas[0].metadata[b"owner"] == b"us"
    found = ds.dataset(out).to_table()
    for name in source.schema.names:
        assert found.column(name).to_pylist() == source.column(name).to_pylist(), name
    nanoseconds = found.column("nanoseconds").cast(pa.int64()).to_pylist()
    assert nanoseconds == [1_774_747_800_000_000_001, None] * 2


def test_pandas_polars_and_duckdb_read_the_output(tmp_path: Path) -> None:
    write_input(tmp_path / "in.parquet")
    out = run(tmp_path)
    frame = pd.read_parquet(out)
    assert list(frame["id"]) == ["r0", "r1", "r2", "r3"]
    assert frame["content"].notna().all() and frame["error"].isna().all()
    assert frame["zone"].dt.tz is not None and frame["decimal"][0] == Decimal("123.4500")
    assert frame["nanoseconds"][0].value == 1_774_747_800_000_000_001
    polars = pl.read_parquet(out / "*.parquet")
    assert polars.shape == (4, len(TYPES) + 2 + len(own_schema(False)))
    assert polars["row_id"].to_list() == ["r0", "r1", "r2", "r3"]
    assert polars["uint64"].to_list()[0] == 2**64 - 1 and polars["list"].to_list()[0] == ["x", None]
    rows = duckdb.sql(
        f"select id, content, error, \"int64\", decimal from '{out}/*.parquet' order by id"
    ).fetchall()
    assert [row[0] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert rows[0][2:] == (None, 2**53 + 1, Decimal("123.4500"))


def test_an_output_without_rows_has_the_whole_schema(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.parquet").slice(0, 0)
    pq.write_table(source, tmp_path / "in.parquet")
    out = run(tmp_path)
    (part,) = out.glob("*.parquet")
    schema = pq.read_schema(part)
    assert schema.names == [*source.schema.names, *own_schema(False).names]
    for field in own_schema(False):
        assert schema.field(field.name).equals(field)
    assert pl.read_parquet(part).schema["tool_calls"] == pl.List(
        pl.Struct({"name": pl.String, "arguments": pl.String})
    )
    assert duckdb.sql(f"select count(*) from '{part}'").fetchall() == [(0,)]
    assert pd.read_parquet(out).shape == (0, len(schema))


def test_lines_are_read_by_the_same_packages(tmp_path: Path) -> None:
    write_input(tmp_path / "in.parquet")
    out = run(tmp_path, "jsonl")
    names = [*pq.read_schema(tmp_path / "in.parquet").names, *own_schema(False).names]
    parts = sorted(out.glob("*.jsonl"))
    frame = pd.concat([pd.read_json(part, lines=True, dtype=False) for part in parts])
    assert list(frame.columns) == names and list(frame["id"]) == ["r0", "r1", "r2", "r3"]
    polars = pl.read_ndjson(parts[0])
    assert set(polars.columns) == set(names) and polars["row_id"].to_list() == ["r0", "r1", "r2"]
    assert polars["zone"].to_list()[0].startswith("2026-03-29 03:30:00.000001")
    found = duckdb.sql(f"select id, content, decimal from read_json('{out}/*.jsonl') order by id")
    assert found.fetchall()[0] == ("r0", frame["content"].iloc[0], "123.4500")
