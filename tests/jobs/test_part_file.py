"""Parts as lines: every type as JSON, and our columns back as they were."""

import datetime
import json
from base64 import b64decode
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchmla.jobs.columns import Finished, finished_table, own_schema
from batchmla.jobs.json_values import json_line, json_lines, json_rows, json_values
from batchmla.jobs.openai_body import CHAT, TEXT
from batchmla.jobs.openai_lines import BatchLines
from batchmla.jobs.part_file import JsonlParts, ParquetParts, PlainLines

_STRUCT = pa.struct([("a", pa.list_(pa.binary())), ("b", pa.null())])


@pytest.mark.parametrize(
    ("array", "values"),
    [
        (pa.array([1, None], pa.uint64()), [1, None]),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (pa.array([True, None]), [True, None]),
        (pa.array([1.5, float("nan"), float("inf"), None]), [1.5, None, None, None]),
        (pa.array(["x", None], pa.large_string()), ["x", None]),
        (pa.array(["x", None], pa.string_view()), ["x", None]),
        (pa.array(["x", "x", None]).dictionary_encode(), ["x", "x", None]),
        (pa.array([b"\xff\0", None]), ["/wA=", None]),
        (pa.array([None, None], pa.null()), [None, None]),
        (pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)), ["1.50", None]),
        (pa.array([datetime.date(2024, 2, 29), None]), ["2024-02-29", None]),
        (
            pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", "UTC")),
            ["2023-11-14 22:13:20.123456789Z", None],
        ),
        (pa.array([datetime.timedelta(seconds=2)], pa.duration("ms")), [2000]),
        (pa.array([datetime.time(1, 2, 3)], pa.time32("s")), ["01:02:03"]),
        (pa.array([[1, None], [], None], pa.list_(pa.int8())), [[1, None], [], None]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)), [[1, 2], None, [3, 4]]),
        (
            pa.array([{"a": [b"x"], "b": None}, None], _STRUCT),
            [{"a": ["eA=="], "b": None}, None],
        ),
        (pa.array([{}, None], pa.struct([])), [{}, None]),
        (pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8())), [{"k": 1}, None]),
        (pa.array([[(1, 2.0)], []], pa.map_(pa.int8(), pa.float32())), [[[1, 2.0]], []]),
    ],
    ids=lambda one: str(one.type) if isinstance(one, pa.Array) else "",
)  # fmt: skip
def test_every_type_has_a_json_form(array: pa.Array, values: list[Any]) -> None:
    column = pa.chunked_array([array.slice(0, 1), array.slice(1)])  # offsets are respected
    assert json_values(column) == values
    assert json.loads(json_line(values)) == values


def test_a_line_is_one_line_for_every_reader() -> None:
    text = "a\nb\r\u2028c\u2029d\x85e\x0bf\0 é 龘 🦙"
    line = json_line({"t": text})
    assert line.decode().splitlines(keepends=True) == [line.decode()]
    assert json.loads(line) == {"t": text} and "龘 🦙" in line.decode()


ROWS = [
    Finished(
        0, 0, 0, "a", reasoning="why\n", content="", finish_reason="length",
        reasoning_state="length", lossy=True, prompt_tokens=7, cached_tokens=4, reasoning_tokens=5,
    ),
    Finished(
        1, 0, 1, "b", content=" yes ", finish_reason="tool_calls", prompt_tokens=3,
        content_tokens=9, tool_calls=[{"name": "f", "arguments": '{"x": 1}'}],
        tool_error="one more was cut",
    ),
    Finished(2, 0, 2, "c", prompt_tokens=11, error="the prompt is too long"),
    Finished(3, 0, 3, "d", content="x", finish_reason="stop"),
]  # fmt: skip
CARRIED = pa.table({"n": [0, 1, 2, 3], "url": [CHAT, CHAT, CHAT, TEXT]})


def own_table(token_ids: bool) -> pa.Table:
    rows = ROWS
    if token_ids:
        rows = [row._replace(token_ids=[1, 2], prompt_token_ids=[3]) for row in ROWS]
        rows[2] = rows[2]._replace(token_ids=None, prompt_token_ids=None)
    return finished_table(rows, token_ids)


def batch_lines(**changes: Any) -> BatchLines:
    given: dict[str, Any] = {
        "job_id": "j", "created_s": 1_700_000_000, "model": "m", "url": None, "has_token_ids": False
    }  # fmt: skip
    return BatchLines(**{**given, **changes})


@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "openai_batch"])
def test_our_columns_come_back_from_a_part(tmp_path: Path, kind: str, token_ids: bool) -> None:
    own, table = own_schema(token_ids), own_table(token_ids)
    form: Any = JsonlParts(own, PlainLines(own, "x_"))
    if kind == "openai_batch":
        form = JsonlParts(own, batch_lines(has_token_ids=token_ids))
    if kind == "parquet":
        names = [("n", pa.int64()), ("url", pa.string()), *((f"x_{f.name}", f.type) for f in own)]
        form = ParquetParts(pa.schema(names), own, "x_", "zstd")
    path = tmp_path / "part"
    form.write(path, [(CARRIED.slice(0, 3), table.slice(0, 3)), (CARRIED.slice(3), table.slice(3))])
    found = list(form.read(path))
    ours = pa.concat_tables(one for _, one in found)
    assert ours.schema == own and ours.to_pylist() == table.select(own.names).to_pylist()
    assert form.own(path, ["error", "row_id"]).to_pylist() == (
        table.select(["error", "row_id"]).to_pylist()
    )
    kept = [one for one, _ in found]
    assert pa.concat_tables(kept) == CARRIED if kind == "parquet" else kept == [None]
    form.write(path, [])
    assert form.own(path, ["error"]).num_rows == 0


def test_a_row_as_a_line_has_every_column(tmp_path: Path) -> None:
    form = JsonlParts(own_schema(False), PlainLines(own_schema(False), "x_"))
    form.write(tmp_path / "part", [(CARRIED, own_table(False))])
    lines = [json.loads(line) for line in (tmp_path / "part").read_bytes().splitlines()]
    assert list(lines[2]) == ["n", "url", *(f"x_{name}" for name in own_schema(False).names)]
    assert lines[2]["x_error"] == "the prompt is too long" and lines[2]["x_content"] is None
    assert lines[1]["x_tool_calls"] == [{"name": "f", "arguments": '{"x": 1}'}]


def test_results_have_the_shape_of_an_openai_batchs(tmp_path: Path) -> None:
    form = JsonlParts(own_schema(False), batch_lines())
    form.write(tmp_path / "part", [(CARRIED, own_table(False))])
    cut, called, failed, text = (json.loads(one) for one in (tmp_path / "part").open("rb"))
    assert list(cut) == ["id", "custom_id", "response", "error"]
    assert cut["custom_id"] == "a" and cut["error"] is None
    response = cut["response"]
    assert response["status_code"] == 200 and response["request_id"].startswith("req_")
    body = response["body"]
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert (body["object"], body["created"], body["model"]) == (
        "chat.completion",
        1_700_000_000,
        "m",
    )
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "", "reasoning": "why\n"},
            "logprobs": None,
            "finish_reason": "length",
            "reasoning_state": "length",
            "lossy": True,
            "tool_error": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }
    call = called["response"]["body"]["choices"][0]["message"]["tool_calls"][0]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert failed["response"] is None and failed["custom_id"] == "c"
    assert failed["error"]["code"] == "row_failed"
    assert failed["error"]["message"] == "the prompt is too long"
    assert text["response"]["body"]["object"] == "text_completion"
    assert text["response"]["body"]["choices"][0]["text"] == "x"
    ids = {one["id"] for one in (cut, called, failed, text)}
    assert len(ids) == 4 and all(one.startswith("batch_req_") for one in ids)
    form.write(tmp_path / "again", [(CARRIED, own_table(False))])
    assert (tmp_path / "again").read_bytes() == (tmp_path / "part").read_bytes()


def test_bytes_are_base64() -> None:
    (text,) = json_values(pa.chunked_array([[bytes(range(256))]]))
    assert b64decode(text) == bytes(range(256))


def test_lines_by_column_are_those_by_row() -> None:
    odd = ["", 'say "x"', "a\nb\u2028c\u2029d\x85e\0", "é 龘 🦙", "\\", None]
    table = pa.table(
        {
            'n "1"': pa.array([1, -2, 2**62, None, 0, 7]),
            "text": odd,
            "all": pa.array([f"{n}%s {{}}" for n in range(6)], pa.large_string()),
            "none": pa.nulls(6, pa.string()),
            "x": pa.array([0.1, -0.0, 1e300, float("nan"), float("inf"), 2.0]),
            "yes": [True, False, True, True, False, False],
            "maybe": [True, None, False, None, None, True],
            "inner": [{"a": [1, None]}, None, {"a": []}, {"a": None}, {"a": [2]}, None],
            "cat": pa.array(["u", "v", None, "u", "v", "u"]).dictionary_encode(),
            "empty": pa.nulls(6),
        }
    )
    for part in (table, table.slice(1, 3), table.slice(5), table.slice(0, 0), table.select([])):
        columns = dict(zip(part.column_names, part.columns, strict=True))
        found = json_lines(columns, part.num_rows)
        assert found == b"".join(map(json_line, json_rows(part)))
        assert [json.loads(line) for line in found.split(b"\n")[:-1]] == list(json_rows(part))
