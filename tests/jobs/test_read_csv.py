"""CSV input: records, headers, types of columns, malformed records."""

import csv
import gzip
import io
import tempfile
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.errors import JobError
from batchmla.jobs.csv_form import CsvForm
from batchmla.jobs.files import find_files
from batchmla.jobs.read import InputTable, open_input
from batchmla.jobs.row import Row
from batchmla.jobs.settings import InputSettings
from batchmla.jobs.text_source import TextSource


def put(folder: Path, content: bytes | str, name: str = "in.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(path: Path, malformed: Literal["fail", "row"] = "fail", **settings: Any) -> InputTable:
    return open_input(InputSettings(path=str(path), **settings), malformed=malformed)


def all_rows(source: InputTable, start: int = 0) -> list[Row]:
    return [row for batch in source.rows(start) for row in batch]


def carried(source: InputTable, start: int = 0) -> pa.Table:
    return pa.Table.from_batches(source.carried_batches(start), source.carried)


def fault(source: InputTable) -> str:
    with pytest.raises(JobError) as caught:
        source.scan()
    return str(caught.value)


RECORDS = b'id,n,text\na,1,"x, ""y"""\nb,,"two\nlines"\n'
ROWS = {"id": ["a", "b"], "n": [1, None], "text": ['x, "y"', "two\nlines"]}


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (RECORDS, "in.csv"),
        (b"\xef\xbb\xbf" + RECORDS, "in.csv"),
        (RECORDS.replace(b",1,", b",1,").replace(b'"\nb', b'"\r\nb'), "in.csv"),
        (RECORDS.rstrip(b"\n"), "in.csv"),
        (b"\n" + RECORDS.replace(b"\nb,", b"\n\n\r\nb,"), "in.csv"),
        (gzip.compress(RECORDS), "in.csv.gz"),
        (pa.Codec("zstd").compress(RECORDS, asbytes=True), "in.csv.zst"),
    ],
    ids=["plain", "bom", "crlf", "no final newline", "blank lines", "gzip", "zstd"],
)
def test_the_form_of_a_file_changes_no_row(tmp_path: Path, content: bytes, name: str) -> None:
    source = table(put(tmp_path, content, name))
    assert source.scan().num_rows == 2
    assert carried(source).to_pydict() == ROWS
    rows = all_rows(source)
    assert [(row.number, row.typed_id, row.values["n"]) for row in rows] == [
        (0, "a", 1),
        (1, "b", None),
    ]
    assert [row.values["text"] for row in rows] == ROWS["text"]
    assert all_rows(source, start=1) == rows[1:]
    assert carried(source, start=1).to_pylist() == carried(source).to_pylist()[1:]


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["1", "-20", ""], pa.int64(), [1, -20, None]),
        (["18446744073709551615", "0"], pa.uint64(), [2**64 - 1, 0]),
        (["18446744073709551616", "0"], pa.string(), ["18446744073709551616", "0"]),
        (["007", "1"], pa.string(), ["007", "1"]),
        (["+1", "2"], pa.string(), ["+1", "2"]),
        ([" 1", "2"], pa.string(), [" 1", "2"]),
        (["1", "2.50", "1e-3", ".5", "-0"], pa.float64(), [1.0, 2.5, 0.001, 0.5, -0.0]),
        (["9007199254740993", "0.5"], pa.string(), ["9007199254740993", "0.5"]),
        (["1e999", "1"], pa.string(), ["1e999", "1"]),
        (["nan", "1"], pa.string(), ["nan", "1"]),
        (["true", "False", ""], pa.bool_(), [True, False, None]),
        (["true", "1"], pa.string(), ["true", "1"]),
        (["", ""], pa.string(), [None, None]),
        (["NA", "null", ""], pa.string(), ["NA", "null", None]),
    ],
)
def test_a_column_has_the_type_that_all_its_cells_are_written_as(
    tmp_path: Path, cells: list[str], kind: pa.DataType, values: list[Any]
) -> None:
    source = table(put(tmp_path, "v,w\n" + "".join(f"{cell},x\n" for cell in cells)))
    source.scan()
    assert source.carried.field("v").type == kind
    assert carried(source).column("v").to_pylist() == values
    assert [row.values["v"] for row in all_rows(source)] == values


def test_ids_are_the_cells_text(tmp_path: Path) -> None:
    source = table(put(tmp_path, "id,t\n7,a\n8,b\n"))
    source.scan()
    assert [row.typed_id for row in all_rows(source)] == ["7", "8"]
    assert source.carried.field("id").type == pa.int64()
    said = fault(table(put(tmp_path, "id,t\n7,a\n8,b\n7,c\n")))
    assert f"{tmp_path}/in.csv:4: the id '7' was already used at {tmp_path}/in.csv:2" in said
    assert "in.csv:3: the id column id is empty" in fault(table(put(tmp_path, "id,t\n7,a\n,b\n")))


def test_columns_of_several_headers_meet_by_name(tmp_path: Path) -> None:
    put(tmp_path, "id,a\n1,x\n", "1.csv")
    put(tmp_path, "b,id\n2.5,2\n", "2.csv")
    put(tmp_path, "", "3.csv")
    source = table(tmp_path)
    assert source.scan().num_rows == 2
    assert source.carried.names == ["id", "a", "b"]
    assert carried(source).to_pydict() == {"id": [1, 2], "a": ["x", None], "b": [None, 2.5]}


MALFORMED = (
    b"id,t\n"
    b'a,"quoted\nnewline"\n'  # lines 2-3
    b"b\n"
    b"c,x,y\n"
    b"d,caf\xe9\n"
    b'e,"x"y\n'
    b"f,good\n"
)


def test_malformed_records_are_listed_with_their_lines(tmp_path: Path) -> None:
    said = fault(table(put(tmp_path, MALFORMED)))
    path = f"{tmp_path}/in.csv"
    assert "the input has 4 malformed rows" in said
    assert f"{path}:4: 1 cell where the header names 2 columns" in said
    assert f"{path}:5: 3 cells where the header names 2 columns" in said
    assert f"{path}:6: byte 0xe9 at position 5 is not UTF-8" in said
    assert f"{path}:7: not valid CSV: " in said


def test_malformed_records_can_be_error_rows(tmp_path: Path) -> None:
    source = table(put(tmp_path, MALFORMED), malformed="row")
    assert source.scan().malformed_rows == 4
    rows = all_rows(source)
    assert [row.error is None for row in rows] == [True, False, False, False, False, True]
    assert rows[1].error == (
        f"malformed row at {tmp_path}/in.csv:4: 1 cell where the header names 2 columns"
    )
    assert carried(source).column("t").to_pylist() == ["quoted\nnewline", *[None] * 4, "good"]


def test_a_quote_left_open_ends_at_the_end_of_the_file(tmp_path: Path) -> None:
    said = fault(table(put(tmp_path, 'id,t\na,"never closed\nb,x\n')))
    assert "in.csv:2: not valid CSV: unexpected end of data" in said


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("id,t,id", "names id twice; rename one"),
        (",t", "has no name for column 1"),
        ("id;t", "holds no comma"),
        ('id,"x"y', "cannot be read"),
    ],
)
def test_a_header_that_cannot_be_used_is_refused(tmp_path: Path, header: str, said: str) -> None:
    with pytest.raises(JobError, match=r"in\.csv, line 1: the header") as caught:
        table(put(tmp_path, header + "\na,b\n")).scan()
    assert said in str(caught.value)


def test_a_late_cell_that_contradicts_the_type_is_malformed(tmp_path: Path) -> None:
    settings = InputSettings(path=str(put(tmp_path, "id,n\na,1\nb,2\nc,x\nd,\n")))
    source = TextSource(find_files(settings), None, CsvForm(), typed_rows=2)
    opened = InputTable(source, settings, "row")
    opened.scan()
    rows = all_rows(opened)
    assert [row.error is None for row in rows] == [True, True, False, True]
    assert "the value of n is not a whole number as in the rows before" in str(rows[2].error)
    full = InputTable(
        TextSource(find_files(settings), None, CsvForm(), typed_rows=2), settings, "row"
    )
    full.scan("full")
    assert carried(full).column("n").to_pylist() == ["1", "2", "x", None]


def test_nul_and_a_cell_of_megabytes_come_through(tmp_path: Path) -> None:
    big = "wort " * 800_000
    source = table(put(tmp_path, f'id,t\na,"{big}"\nb,nul \0 inside\n'))
    assert [row.values["t"] for row in all_rows(source)] == [big, "nul \0 inside"]


def test_a_header_alone_is_an_input_without_rows(tmp_path: Path) -> None:
    source = table(put(tmp_path, "id,t\n"))
    assert source.scan().num_rows == 0 and all_rows(source) == []
    assert source.carried == pa.schema([("id", pa.string()), ("t", pa.string())])


def test_a_cut_stream_names_the_file_and_the_rows_before(tmp_path: Path) -> None:
    content = b"id,t\n" + b"".join(b"%d,%x\n" % (n, n * 7919**3) for n in range(2000))
    cut = gzip.compress(content)[:-2000]
    with pytest.raises(JobError, match=r"in\.csv\.gz is cut short or damaged after \d+ rows"):
        table(put(tmp_path, cut, "in.csv.gz")).scan()


CELLS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", "1", "-7", "2.5", "true", "007", "a\nb", 'say ""', ",", "\r\n", "\u2028"]
)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=8), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=150, deadline=None)
def test_what_a_csv_writer_writes_is_read_as_it_was(
    cells: list[tuple[str, str]], line_end: str
) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator=line_end, quoting=csv.QUOTE_ALL)
    writer.writerows([("a", "b"), *cells])
    with tempfile.TemporaryDirectory() as folder:
        source = table(put(Path(folder), buffer.getvalue()))
        assert source.scan().num_rows == len(cells)
        rows = [tuple(row.values.values()) for row in all_rows(source)]
        found = [tuple(row.values()) for row in carried(source).to_pylist()]
    assert rows == found
    for place, name in enumerate(source.carried.names):
        column = [row[place] for row in found]
        if source.carried.field(name).type == pa.string():
            assert column == [row[place] or None for row in cells]
        else:  # written as the type that it was read as
            given_cells = [row[place].lower() for row in cells]
            assert all(
                (one is None and not text) or (one is not None and float(one) == _number(text))
                for one, text in zip(column, given_cells, strict=True)
            )


def _number(text: str) -> float:
    return float(text == "true") if text in ("true", "false") else float(text)
