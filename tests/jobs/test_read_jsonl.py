"""JSONL input: lines, compression, malformed rows, types of carried columns, ids."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest

from batchmla.errors import JobError
from batchmla.jobs.files import find_files
from batchmla.jobs.jsonl import JsonlForm
from batchmla.jobs.read import InputTable, open_input
from batchmla.jobs.row import Row
from batchmla.jobs.settings import InputSettings
from batchmla.jobs.text_source import TextSource


def put(folder: Path, content: bytes | str | list[Any], name: str = "in.jsonl") -> Path:
    path = folder / name
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(path: Path, malformed: Literal["fail", "row"] = "fail", **settings: Any) -> InputTable:
    return open_input(InputSettings(path=str(path), **settings), malformed=malformed)


def all_rows(source: InputTable, start: int = 0, limit: int | None = None) -> list[Row]:
    return [row for batch in source.rows(start, limit) for row in batch]


def carried(source: InputTable, start: int = 0) -> pa.Table:
    return pa.Table.from_batches(source.carried_batches(start), source.carried)


def fault(source: InputTable) -> str:
    with pytest.raises(JobError) as caught:
        source.scan()
    return str(caught.value)


LINES = b'{"id": "a", "n": 1}\n{"id": "b", "n": 2}\n'


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        b"\xef\xbb\xbf" + LINES,
        LINES.replace(b"\n", b"\r\n"),
        LINES.rstrip(b"\n"),
        b"\n  \n" + LINES.replace(b"\n", b"\r\n\r\n\t\n"),
        LINES.replace(b"{", b"  {"),
    ],
    ids=["plain", "bom", "crlf", "no final newline", "blank lines", "indented"],
)
def test_the_form_of_lines_changes_no_row(tmp_path: Path, content: bytes) -> None:
    source = table(put(tmp_path, content))
    assert source.scan().num_rows == 2
    rows = all_rows(source)
    assert [(row.index, row.number, row.id, row.values["n"]) for row in rows] == [
        (0, 0, "a", 1),
        (1, 1, "b", 2),
    ]
    assert carried(source).to_pydict() == {"id": ["a", "b"], "n": [1, 2]}
    assert source.carried == pa.schema([("id", pa.string()), ("n", pa.int64())])


def test_only_lf_ends_a_line(tmp_path: Path) -> None:
    odd = "\u2028 \u2029 \x85 \x0b"
    text = "".join(
        json.dumps({"id": str(n), "t": odd}, ensure_ascii=False) + "\n" for n in range(3)
    )
    source = table(put(tmp_path, text.replace("\\u000b", "\\u000b")))
    assert [row.values["t"] for row in all_rows(source)] == [odd] * 3


def test_nul_and_control_characters_pass_intact(tmp_path: Path) -> None:
    texts = ["nul \x00 inside", "esc \x1b[31m", "bom \ufeff inside", "pair \U0001f600"]
    source = table(put(tmp_path, [{"id": n, "t": text} for n, text in enumerate(texts)]))
    assert [row.values["t"] for row in all_rows(source)] == texts
    assert carried(source).column("t").to_pylist() == texts


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.ndjson.zst", "x.jsonl"])
@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_compressed_files_read_like_plain_ones(tmp_path: Path, name: str, compression: str) -> None:
    if name.endswith((".gz", ".zst")) and (compression == "gzip") != name.endswith(".gz"):
        is_zstd = compression == "zstd"
        packed = pa.compress(LINES, "zstd", asbytes=True) if is_zstd else gzip.compress(LINES)
        with pytest.raises(JobError, match=f"is not .* data: it holds {compression}"):
            table(put(tmp_path, packed, name))
        return
    packed = gzip.compress(LINES) if compression == "gzip" else b""
    if compression == "zstd":
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(LINES)
        packed = sink.getvalue().to_pybytes()
    source = table(put(tmp_path, packed, name))
    assert source.scan().num_rows == 2
    assert [row.id for row in all_rows(source)] == ["a", "b"]


def test_members_of_a_gzip_file_follow_each_other(tmp_path: Path) -> None:
    more = b'{"id": "c", "n": 3}\n'
    source = table(put(tmp_path, gzip.compress(LINES) + gzip.compress(more), "x.jsonl.gz"))
    assert [row.id for row in all_rows(source)] == ["a", "b", "c"]


@pytest.mark.parametrize("cut", [1, 8, 12])
def test_a_cut_stream_names_the_file_and_the_rows_so_far(tmp_path: Path, cut: int) -> None:
    lines = b"".join(b'{"id": "%d", "t": "%d"}\n' % (n, n * 7919) for n in range(500))
    source = table(put(tmp_path, gzip.compress(lines)[:-cut], "x.jsonl.gz"), malformed="row")
    said = fault(source)
    assert "x.jsonl.gz is cut short or damaged after" in said
    assert "its gzip stream" in said


def test_a_damaged_zstd_stream_is_named(tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(LINES * 100)
    packed = sink.getvalue().to_pybytes()
    assert "cut short or damaged" in fault(table(put(tmp_path, packed[:-3], "x.jsonl.zst"), id="n"))


BROKEN = b"""{"id": "a", "p": "one"}
{"id": "b", "p": "two",}

{'id': 'c'}
[1, 2, 3]
"text"
{"id": "g", "p": "latin1 \xb2"}
{"id": "h", "id": "h2"}
{"id": "i", "m": {"k": 1, "k": 2}}
{"id": "j", "p": "end"}
"""


def test_malformed_lines_are_listed_together_with_their_file_lines(tmp_path: Path) -> None:
    said = fault(table(put(tmp_path, BROKEN)))
    assert "the input has 7 malformed rows" in said
    expected = {2: "not valid JSON", 4: "not valid JSON", 5: "a list, not an object",
                6: "text, not an object", 7: "byte 0xb2", 8: 'the key "id" is given twice',
                9: 'the key "k" is given twice'}  # fmt: skip
    lines = said.splitlines()
    for number, reason in expected.items():
        assert any(f"in.jsonl:{number}: {reason}" in line for line in lines), number
    assert "errors.malformed: row" in said


def test_many_malformed_lines_are_counted_and_capped(tmp_path: Path) -> None:
    said = fault(table(put(tmp_path, b"{}x\n" * 1000)))
    assert "1000 malformed rows" in said
    assert "and 980 more" in said
    assert len(said.splitlines()) < 25


def test_malformed_lines_become_error_rows_when_asked(tmp_path: Path) -> None:
    source = table(put(tmp_path, BROKEN), "row")
    assert source.scan().malformed_rows == 7
    rows = all_rows(source)
    assert [row.error is None for row in rows] == [True] + [False] * 7 + [True]
    assert rows[1].id == "in.jsonl:1"
    assert rows[2].id == "in.jsonl:2"  # the blank line is no row
    assert "in.jsonl:4: not valid JSON" in str(rows[2].error)
    assert rows[1].values == {}
    assert carried(source).column("id").to_pylist() == ["a"] + [None] * 7 + ["j"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"id": null}', "the id column id is null"),
        ('{"x": 1}', "the id column id is missing"),
        ('{"id": 1.0}', "neither text nor a whole number"),
        ('{"id": true}', "neither text nor a whole number"),
        ('{"id": ["a"]}', "neither text nor a whole number"),
        ('{"id": "\\ud800"}', "the id column id holds a lone surrogate"),
        ('{"id": ' + "9" * 5000 + "}", "thousands of digits"),
        ('{"id": 1, "x": ' + "[" * 100_000 + "}", "nested too deeply"),
        ("null", "null, not an object"),
        ("3", "a number, not an object"),
    ],
)
def test_a_line_without_a_usable_id_is_malformed(tmp_path: Path, line: str, reason: str) -> None:
    said = fault(table(put(tmp_path, '{"id": "first"}\n' + line)))
    assert f"in.jsonl:2: {reason}" in said or (reason in said and "in.jsonl:2: " in said)


def test_ids_keep_numbers_and_text_apart(tmp_path: Path) -> None:
    source = table(put(tmp_path, [{"id": 7}, {"id": "7"}, {"id": 2**70}, {"id": -1}, {"id": ""}]))
    source.scan()
    rows = all_rows(source)
    assert [row.typed_id for row in rows] == [7, "7", 2**70, -1, ""]
    assert [row.id for row in rows] == ["7", "7", str(2**70), "-1", ""]
    assert carried(source).column("id").to_pylist() == ["7", '"7"', str(2**70), "-1", '""']


def test_repeated_ids_name_both_places(tmp_path: Path) -> None:
    put(tmp_path, [{"id": n} for n in range(9_000)], "a.jsonl")
    put(tmp_path, "\n" + "".join(f'{{"id": {n}}}\n' for n in (30_000, 5, 7, 30_000)), "b.jsonl")
    said = fault(table(tmp_path))
    assert "the input has 3 repeated ids" in said
    assert "b.jsonl:3: the id 5 was already used at" in said
    assert f"{tmp_path / 'a.jsonl'}:6" in said
    assert f"b.jsonl:5: the id 30000 was already used at {tmp_path / 'b.jsonl'}:2" in said


def test_without_an_id_column_rows_are_named_by_file_and_number(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    put(tmp_path, '\n{"t": 1}\n\n{"t": 2}\n', "b.jsonl")
    put(tmp_path / "sub", [{"t": 3}], "a.jsonl")
    source = table(tmp_path)
    assert source.id_column is None
    assert [row.id for row in all_rows(source)] == ["b.jsonl:0", "b.jsonl:1", "sub/a.jsonl:0"]
    named = table(tmp_path, id="t")
    assert [row.typed_id for row in all_rows(named)] == [1, 2, 3]


def test_lone_surrogates_fail_their_row_only(tmp_path: Path) -> None:
    text = (
        '{"id": "a", "p": "half \\ud835 char"}\n{"id": "b", "p": "pair \\ud83d\\ude00"}\n'
        '{"id": "c", "m": {"deep": ["\\udcb2"]}}\n{"id": "d", "p": "\\\\ud835 escaped"}\n'
    )
    source = table(put(tmp_path, text))
    source.scan()
    rows = all_rows(source)
    assert [row.error is None for row in rows] == [False, True, False, True]
    assert 'column "p" holds a lone surrogate' in str(rows[0].error)
    assert rows[1].values["p"] == "pair \U0001f600"
    assert rows[3].values["p"] == "\\ud835 escaped"
    found = carried(source)
    assert found.column("p").to_pylist()[0] == "half \ufffd char"
    assert found.column("m").to_pylist()[2] == {"deep": ["\ufffd"]}


TYPES: list[tuple[list[Any], pa.DataType, list[Any]]] = [
    ([1, 2], pa.int64(), [1, 2]),
    ([1, 2.5], pa.float64(), [1.0, 2.5]),
    ([2**53 + 1, 2.5], pa.string(), ["9007199254740993", "2.5"]),
    ([2**63, 1], pa.uint64(), [2**63, 1]),
    ([2**63, -1], pa.string(), [str(2**63), "-1"]),
    ([2**64], pa.string(), [str(2**64)]),
    ([True, False], pa.bool_(), [True, False]),
    ([True, 1], pa.string(), ["true", "1"]),
    (["a", None], pa.string(), ["a", None]),
    ([1, "high", None], pa.string(), ["1", '"high"', None]),
    ([None, None], pa.string(), [None, None]),
    ([float("nan"), 1], pa.float64(), ["nan", 1.0]),
    ([float("nan"), "x"], pa.string(), [None, "x"]),
    ([[], ["x"]], pa.list_(pa.string()), [[], ["x"]]),
    ([[], []], pa.list_(pa.string()), [[], []]),
    ([[1], [2.5, None]], pa.list_(pa.float64()), [[1.0], [2.5, None]]),
    ([[1], ["x"]], pa.string(), ["[1]", '["x"]']),
    ([{}, {"k": 1}], pa.struct([("k", pa.int64())]), [{"k": None}, {"k": 1}]),
    ([{}, {}], pa.string(), ["{}", "{}"]),
    ([{"a": 1}, {"b": "x", "a": None}], pa.struct([("a", pa.int64()), ("b", pa.string())]),
     [{"a": 1, "b": None}, {"a": None, "b": "x"}]),
    ([{"a": 1}, [1]], pa.string(), ['{"a": 1}', "[1]"]),
    ([{"a": [{"b": 1}]}], pa.struct([("a", pa.list_(pa.struct([("b", pa.int64())])))]),
     [{"a": [{"b": 1}]}]),
    (["2024-01-01T00:00:00Z"], pa.string(), ["2024-01-01T00:00:00Z"]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "dtype", "expected"), TYPES)
def test_one_type_holds_all_values_of_a_column(
    tmp_path: Path, values: list[Any], dtype: pa.DataType, expected: list[Any]
) -> None:
    for ordered, wanted in ((values, expected), (values[::-1], expected[::-1])):
        source = table(put(tmp_path, [{"id": n, "v": v} for n, v in enumerate(ordered)]))
        source.scan()
        found = source.carried.field("v").type
        if pa.types.is_struct(dtype):  # fields come in the order of their first appearance
            assert sorted(found, key=str) == sorted(dtype, key=str)
        else:
            assert found == dtype
        assert carried(source).column("v").to_pylist() == [
            pytest.approx(float("nan"), nan_ok=True) if one == "nan" else one for one in wanted
        ]


def test_mixed_types_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = table(put(tmp_path, [{"id": 1, "score": 1}, {"id": 2, "score": "high"}]))
    with caplog.at_level(logging.WARNING, logger="batchmla"):
        source.scan()
    assert "carried as JSON text: score" in caplog.text


def test_a_late_column_is_null_before(tmp_path: Path) -> None:
    source = table(put(tmp_path, [{"id": 1}, {"id": 2, "late": "x"}]))
    source.scan()
    assert carried(source).column("late").to_pylist() == [None, "x"]
    assert [row.values for row in all_rows(source)] == [
        {"id": 1, "late": None},
        {"id": 2, "late": "x"},
    ]


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        ({"id": 9, "n": "text"}, "the value of n is not a whole number"),
        ({"id": 9, "n": 1.5}, "the value of n is not a whole number"),
        ({"id": 9, "new": 1}, "the key new was in none of the rows"),
        ({"id": 9, "m": {"other": 1}}, "the value of m is not an object of known keys"),
        ({"id": "nine"}, "the value of id is not a whole number"),
    ],
)
def test_what_contradicts_the_types_too_late_is_malformed(
    tmp_path: Path, late: dict[str, Any], reason: str
) -> None:
    first = [{"id": n, "n": n, "m": {"k": 1}, "z": None} for n in range(3)]
    path = put(tmp_path, [*first, {"id": 3, "n": None, "z": 5}, late])
    settings = InputSettings(path=str(path))
    for malformed in ("fail", "row"):
        source = TextSource(find_files(settings), None, JsonlForm(), typed_rows=3)
        reader = InputTable(source, settings, malformed)  # type: ignore[arg-type]
        if malformed == "fail":
            said = fault(reader)
            assert f"in.jsonl:5: {reason}" in said
            assert "input.check: full" in said
            continue
        assert reader.scan().malformed_rows == 1
        assert [row.error is None for row in all_rows(reader)] == [True] * 4 + [False]
        assert carried(reader).column("z").to_pylist() == [None, None, None, "5", None]
    full = table(path, check="full")
    assert full.scan().num_rows == 5


def test_what_the_scan_did_not_reach_is_checked_while_reading(tmp_path: Path) -> None:
    good = [{"id": n, "n": n} for n in range(3000)]
    path = put(tmp_path, [*good, {"id": 5, "n": 1}, {"id": -1, "n": "text"}])
    settings = InputSettings(path=str(path))

    def reader(malformed: Literal["fail", "row"]) -> InputTable:
        made = InputTable(
            TextSource(find_files(settings), None, JsonlForm(), typed_rows=100), settings, malformed
        )
        found = made.scan(limit_s=0.0)
        assert found.num_rows is None
        assert found.scanned_rows < 1000
        return made

    with pytest.raises(JobError, match=r"in\.jsonl:3001: the id 5 was already used at .*:6"):
        all_rows(reader("fail"))
    with pytest.raises(JobError, match=r"in\.jsonl:3001: the id 5 was already used at .*:6"):
        all_rows(reader("row"), start=2900)  # the skipped rows count, too
    partial = reader("fail")
    assert len(all_rows(partial, 0, 3000)) == 3000
    put(tmp_path, [*good, {"id": -1, "n": "text"}, {"id": -2, "n": 1}])
    with pytest.raises(JobError, match=r"in\.jsonl:3001: the value of n is not a whole number"):
        all_rows(reader("fail"))
    as_rows = reader("row")
    rows = all_rows(as_rows)
    assert rows[3000].error is not None
    assert rows[3001].values["n"] == 1
    assert as_rows.num_rows == 3002
    assert carried(as_rows).column("n").to_pylist()[2999:] == [2999, None, 1]


@pytest.mark.parametrize("start", [0, 1, 1023, 1024, 1500, 2999, 3000, 4000])
def test_reading_may_start_anywhere(tmp_path: Path, start: int) -> None:
    put(tmp_path, [{"id": n} for n in range(1500)], "a.jsonl")
    put(tmp_path, "", "b.jsonl")
    put(tmp_path, [{"id": n} for n in range(1500, 3000)], "c.jsonl")
    source = table(tmp_path)
    for scanned in (False, True):
        rows = all_rows(source, start)
        assert [row.typed_id for row in rows] == list(range(start, 3000))
        assert all(row.index == row.typed_id for row in rows)
        assert [row.file for row in rows] == [0 if n < 1500 else 2 for n in range(start, 3000)]
        assert len(all_rows(source, start, 10)) == len(range(start, min(start + 10, 3000)))
        if not scanned:
            source.scan()
        assert carried(source, start).column("id").to_pylist() == list(range(start, 3000))


def test_input_without_rows_is_valid(tmp_path: Path) -> None:
    for content in (b"", b"\n \n", b"\xef\xbb\xbf"):
        source = table(put(tmp_path, content), columns=["text"])
        assert source.scan().num_rows == 0
        assert all_rows(source) == []
        assert carried(source).num_rows == 0
        source.require(["text"], "prompt.user")
    assert table(put(tmp_path, gzip.compress(b""), "e.jsonl.gz")).scan().num_rows == 0


def test_columns_restrict_what_is_carried_but_keep_the_id(tmp_path: Path) -> None:
    path = put(tmp_path, [{"x": 1, "id": "a", "text": "t", "y": 2}])
    assert table(path, columns=["y", "text"]).carried.names == ["id", "y", "text"]
    assert table(path, columns=[]).carried.names == ["id"]
    assert table(path, columns=["y"], id="text").carried.names == ["text", "y"]
    with pytest.raises(JobError, match=r"input\.columns: .* no column txt; did you mean text"):
        table(path, columns=["txt"]).scan()
    with pytest.raises(JobError, match=r"input\.id: .* no column txt; did you mean text"):
        table(path, id="txt").scan()


def test_carried_rows_without_columns_are_still_counted(tmp_path: Path) -> None:
    source = table(put(tmp_path, [{"x": 1}, {"x": 2}]), columns=[])
    assert len(source.carried) == 0
    assert [batch.num_rows for batch in source.carried_batches()] == [2]


def test_selected_columns_are_the_only_values(tmp_path: Path) -> None:
    source = table(put(tmp_path, [{"id": "a", "x": 1, "y": 2}]))
    source.select(["y"])
    assert all_rows(source)[0].values == {"y": 2}
    assert next(source.rows(columns=["x", "zz"]))[0].values == {"x": 1, "zz": None}


def test_a_line_of_several_megabytes_is_one_row(tmp_path: Path) -> None:
    text = "word " * 800_000
    source = table(put(tmp_path, [{"id": 0, "t": "a"}, {"id": 1, "t": text}, {"id": 2, "t": "b"}]))
    source.scan()
    assert [len(row.values["t"]) for row in all_rows(source)] == [1, len(text), 1]
    assert carried(source).column("t").to_pylist()[1] == text
