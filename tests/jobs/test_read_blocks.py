"""Records read as whole blocks are what they are one by one, whatever the lines hold."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchmla.errors import JobError
from batchmla.jobs.csv_form import CsvForm
from batchmla.jobs.files import find_files
from batchmla.jobs.jsonl import JsonlForm
from batchmla.jobs.jsonl_columns import fits_all, to_arrow_values, widen_all
from batchmla.jobs.jsonl_types import NULL, Kind, fits, settle, to_arrow_value, widen
from batchmla.jobs.lines import read_line_blocks, read_lines
from batchmla.jobs.openai_form import BatchForm
from batchmla.jobs.read import InputTable
from batchmla.jobs.settings import InputSettings
from batchmla.jobs.text_form import MalformedRecord, RecordBlock, TextForm
from batchmla.jobs.text_source import TextSource

QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class OneByOne(JsonlForm):
    """The form that looks at every line by itself."""

    def parse_all(self, block: RecordBlock) -> None:
        """Always."""
        return None


class CsvOneByOne(CsvForm):
    """The same of CSV."""

    def parse_all(self, block: RecordBlock) -> None:
        """Always."""
        return None


class BatchOneByOne(BatchForm):
    """The same of requests."""

    def parse_all(self, block: RecordBlock) -> None:
        """Always."""
        return None


ODD_TEXTS = [
    '"', "\\", '":', '" :', "\\u", "\ud800", "\U0001f600", "\u2028", "\x85", "\r", "\t", "\0",
    '"key": ', "é", "a" * 50, "",
]  # fmt: skip
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(ODD_TEXTS))
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([2**53, 2**53 + 1, 2**63, 2**64, -(2**63), 0, 1, -0.0, 1e400, 10**30]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
KEYS = st.sampled_from(["id", "id", "text", "n", 'k"', "k:", "", "\ud800", "é"])
SPACES = st.sampled_from(["", "", "", " ", "\t", "  ", "\r"])
RAW_LINES = st.sampled_from(
    [
        b'{"id": 1, "id": 2}', b'{"id": 1, "id" : 2}', b'{"id": 3, "n": {"a": 1, "a": 2}}',
        b'{"id": "\\ud800"}', b'{"id": "\\ud83d\\ude00", "text": "\\udc00"}', b'{"id": 1}{"id": 2}',
        b'{"id": 9} x', b'{"id": 01}', b'{"id": 1, "n": NaN}', b'{"id": 1, "n": -Infinity}',
        b'{"id": "\xff"}', b'{"id": "a\x01b"}', b"[1]", b"null", b"{}", b"  ", b"", b'{"id": 4',
        b'1]}', b'{"id": 5, "text": [1', b'{"id": 6, "n": 1E400}', b'{"id": 7, "n": -0}',
        b'{"id": 8, "text": "\\": ", "n": {"\\": ": 1}}', b'\xef\xbb\xbf{"id": 1}',
        b'{"id": 10, "n": ' + b"[" * 40 + b"]" * 40 + b"}",
        b'{"id": 11, "n": ' + b'{"a":' * 40 + b"1" + b"}" * 40 + b"}",
        b'{"id": 12, "n": ' + b"9" * 5000 + b"}",
    ]
)  # fmt: skip


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """A line as somebody may write it: any spacing, keys perhaps twice, escaped or not."""
    is_ascii = draw(st.booleans())
    parts = []
    for key, value in draw(st.lists(st.tuples(KEYS, VALUES), max_size=4)):
        texts = [json.dumps(each, ensure_ascii=is_ascii) for each in (key, value)]
        parts.append(draw(SPACES) + texts[0] + draw(SPACES) + ":" + draw(SPACES) + texts[1])
    line = draw(SPACES) + "{" + ",".join(parts) + "}" + draw(SPACES)
    return line.encode("utf-8", "surrogatepass").replace(b"\n", b" ")


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, NaN to NaN."""
    return repr(a) == repr(b)


def blocks_of(lines: list[bytes]) -> RecordBlock:
    return RecordBlock(0, range(1, len(lines) + 1), list(map(len, lines)), lines)


@given(st.lists(st.one_of(objects(), objects(), RAW_LINES), min_size=1, max_size=6))
@settings(QUICK, max_examples=250)
def test_a_block_is_parsed_as_its_lines_are(lines: list[bytes]) -> None:
    form, block = JsonlForm(), blocks_of(lines)
    found = form.parse_all(block)
    if found is None:
        return
    for record, values in zip(block.records(), found, strict=True):
        wanted, error = form.parse(record)
        assert error is None and same(wanted, values) and list(wanted) == list(values)


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": 1, "text": "plain"}', b'{"id": "a", "n": 1.5, "m": [{"role": "user"}]}',
        b'{"id":1,"t":null}', b'{"id": 1, "t": "\\u00e9 \xc3\xa9"}', b'{"id": 1, "n": NaN}',
        b'{"id": 1, "t": "say \\": "}', b'{"id": 1, "t": "\\ud83d\\ude00"}', b'{"id" : 1}',
    ],
)  # fmt: skip
def test_ordinary_lines_need_no_look_at_each(line: bytes) -> None:
    assert JsonlForm().parse_all(blocks_of([line] * 3)) is not None


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": 1, "id": 1}', b'{"id": 1, "m": {"k": 1, "k": 2}}', b'{"id": 1, "t": "\\ud800"}',
        b'{"a": 1}{"b": 2}', b"[]", b" ", b'{"a": [1', b'{"t": "\xff"}', b'{"a" :1, "a" :2}',
    ],
)  # fmt: skip
def test_a_block_with_a_faulty_line_is_looked_at_line_by_line(line: bytes) -> None:
    assert JsonlForm().parse_all(blocks_of([b'{"id": 1}', line])) is None


def told(form: TextForm, path: Path, id_column: str | None, malformed: Any, typed: int) -> Any:
    """Everything that a reader says of a file."""
    given_settings = InputSettings(path=str(path), id=id_column, format=_format_of(form))
    try:
        source = TextSource(find_files(given_settings), id_column, form, typed_rows=typed)
        table = InputTable(source, given_settings, malformed)
        scan = table.scan(limit_s=1000.0)
        rows = [row for batch in table.rows() for row in batch]
        carried = pa.Table.from_batches(table.carried_batches(), table.carried)
    except JobError as error:
        return str(error)
    columns = [(one.name, str(one.type), carried[one.name].to_pylist()) for one in table.carried]
    return repr((scan, rows, columns, [file.num_rows for file in table.files]))


def _format_of(form: TextForm) -> Any:
    names = {"JSONL": "jsonl", "CSV": "csv", "OpenAI batch": "openai_batch"}
    return names[form.name]


@given(
    st.lists(st.one_of(objects(), objects(), RAW_LINES), max_size=8),
    st.sampled_from([None, "id", "row_number"]),
    st.sampled_from(["fail", "row"]),
    st.sampled_from([2, 1000]),
)
@settings(QUICK, max_examples=150)
def test_a_file_reads_the_same_either_way(
    tmp_path: Path, lines: list[bytes], id_column: str | None, malformed: str, typed: int
) -> None:
    path = tmp_path / "in.jsonl"
    numbered = [line.replace(b'"id": 1,', b'"id": %d,' % n) for n, line in enumerate(lines)]
    path.write_bytes(b"\n".join(numbered))
    one = told(OneByOne(), path, id_column, malformed, typed)
    assert told(JsonlForm(), path, id_column, malformed, typed) == one


@given(st.lists(VALUES, max_size=6), st.sampled_from(["columns", "rows"]))
@settings(QUICK, max_examples=60)
def test_sound_files_read_the_same_either_way(tmp_path: Path, values: list[Any], kind: str) -> None:
    path = tmp_path / "in.jsonl"
    rows: list[dict[str, Any]] = [{"id": n, "v": value} for n, value in enumerate(values)]
    if kind == "rows":
        rows = [{"id": n, f"v{n % 2}": value} for n, value in enumerate(values)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for typed in (1, 1000):
        one = told(OneByOne(), path, "id", "row", typed)
        assert told(JsonlForm(), path, "id", "row", typed) == one


@given(st.lists(st.lists(TEXTS | st.sampled_from(["1", "2.5", "true"]), max_size=3), max_size=6))
@settings(QUICK, max_examples=60)
def test_csv_reads_the_same_either_way(tmp_path: Path, cells: list[list[str]]) -> None:
    path = tmp_path / "in.csv"
    lines = [",".join('"' + one.replace('"', '""') + '"' for one in row) for row in cells]
    text = "id,v\n" + "".join(line + "\n" for line in lines)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for typed in (1, 1000):
        one = told(CsvOneByOne(), path, "row_number", "row", typed)
        assert told(CsvForm(), path, "row_number", "row", typed) == one


def test_requests_read_the_same_either_way(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    good = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"n": 1}}
    for odd in ({"custom_id": None}, {"body": 3}, {"more": 1}, {"method": 7}, {"url": "x"}, {}):
        rows = [good, {**good, "custom_id": "b", **odd}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        one = told(BatchOneByOne(), path, "custom_id", "row", 1000)
        assert told(BatchForm(), path, "custom_id", "row", 1000) == one


def test_what_a_request_lacks_is_malformed() -> None:
    with pytest.raises(MalformedRecord, match="custom_id"):
        BatchForm().parse(next(blocks_of([b"{}"]).records()))


@given(st.lists(VALUES, max_size=6), st.lists(VALUES, max_size=6))
@settings(QUICK, max_examples=150)
def test_columns_are_typed_as_their_values_are(first: list[Any], later: list[Any]) -> None:
    kind: Kind = NULL
    for value in first:
        kind = widen(kind, value)
    assert widen_all(NULL, first) == kind
    further = kind
    for value in later:
        further = widen(further, value)
    assert widen_all(kind, later) == further
    settled = settle(kind)
    for values in (first, later):
        assert fits_all(settled, values) == all(fits(settled, value) for value in values)
    assert same(list(to_arrow_values(settled, first)), [to_arrow_value(settled, v) for v in first])


@given(
    st.lists(st.text("ab \r\té", max_size=5).map(str.encode), max_size=8),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
)
@settings(QUICK, max_examples=100)
def test_blocks_hold_the_lines_of_a_file(
    tmp_path: Path, lines: list[bytes], has_end: bool, end: bytes
) -> None:
    content = end.join(lines) + (end if has_end and lines else b"")
    for name, data in (("x.jsonl", content), ("x.jsonl.gz", gzip.compress(content))):
        path = tmp_path / name
        path.write_bytes(data)
        (file,) = find_files(InputSettings(path=str(path), format="jsonl"))
        found = [
            (first + offset, line)
            for first, lines in read_line_blocks(file)
            for offset, line in enumerate(lines)
        ]
        each = [
            (number, raw.removesuffix(b"\n").removesuffix(b"\r"))
            for number, raw in read_lines(file)
        ]
        assert [line for line in found if line[1]] == [line for line in each if line[1]]


def test_long_lines_and_many_blocks_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl"
    sizes = [10, 3_000_000, 0, 5, 2_000_000, 20] + [300] * 5000
    path.write_bytes(b"".join(b"a" * size + b"\n" for size in sizes))
    (file,) = find_files(InputSettings(path=str(path)))
    found = [
        (first + n, len(one))
        for first, lines in read_line_blocks(file)
        for n, one in enumerate(lines)
    ]
    assert found == list(enumerate(sizes, start=1))
    monkeypatch.setattr("batchmla.jobs.lines.MAX_LINE_BYTES", 2_500_000)
    seen: list[int] = []
    with pytest.raises(JobError, match=r"x\.jsonl:2: the line is longer than"):
        for first, lines in read_line_blocks(file):
            seen += range(first, first + len(lines))
    assert seen == [1]
