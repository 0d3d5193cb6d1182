"""What other tools got wrong with stops, budgets, log-probabilities and grammars: whole jobs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmla.errors import JobError
from batchmla.jobs.run import run_job
from batchmla.jobs.spec import build_spec
from batchmla.text.tokenizer import Tokenizer

DOCUMENTS = [
    "Receipt\nBrask Ltd\n(A) 2 x lamp @ 12.50\n(B) 1 x soap @ 3.20\nThank you!",
    "Hello Dorn, kindly ship\n(A) 3 pens at 1.10 each",
    "Invoice\nFrom: Kiel Market\n[A] tea: 4.00 each, qty 2; [B] cup: 2.25 each, qty 3",
]
ANSWER = {
    "type": "object", "required": ["items", "total"], "additionalProperties": False,
    "properties": {"items": {"type": "integer"}, "total": {"type": "string", "maxLength": 8}},
}  # fmt: skip
IMPOSSIBLE = {"type": "integer", "minimum": 5, "maximum": 3}
Rows = list[dict[str, Any]]
Run = Callable[..., Rows]
TALLY = Path(__file__).resolve().parents[2] / "batchmla" / "builtin" / "tally"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TALLY)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a job over the documents with these sections; its rows."""
    table = pa.table(
        {
            "doc": ["a", "b", "c"],
            "text": DOCUMENTS,
            "penalty": [0.0, 2.0, None],
            "schema": [json.dumps(ANSWER), json.dumps(IMPOSSIBLE), None],
            "stops": pa.array([['"items"'], None, [", "]], pa.list_(pa.string())),
            "top": pa.array([2, None, 0], pa.int32()),
            "shape": pa.array(
                [{"regex": "[0-9]{2}", "choice": None}, {"regex": None, "choice": ["yes"]}, None],
                pa.struct({"regex": pa.string(), "choice": pa.list_(pa.string())}),
            ),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    made: list[Path] = []

    def run(**sections: Any) -> Rows:
        made.append(tmp_path / f"out{len(made)}")
        values = {
            "model": {"path": "builtin:tally"},
            "input": {"path": str(tmp_path / "in.parquet"), "id": "doc"},
            "prompt": {"user": "{{ text }}"},
            "output": {"path": str(made[-1]), "token_ids": True},
            "errors": {"max": 3},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        run_job(build_spec(values), progress="off")
        table = pq.read_table(made[-1] / "part-00000.parquet")
        rows: Rows = table.to_pylist()
        return rows

    return run


def test_fc_054_a_stop_string_cuts_the_content_not_the_reasoning(run: Run) -> None:
    whole = run(reasoning={"budget": 12})
    assert all("A" in row["reasoning"] and '"' in row["content"] for row in whole)
    rows = run(reasoning={"budget": 12}, sampling={"stop": ["A", '"', "=", "*"]})
    for row, full in zip(rows, whole, strict=True):
        assert row["reasoning"] == full["reasoning"] and row["reasoning_state"] == "budget"
        assert row["content"] == full["content"][: full["content"].find('"')]
        assert row["finish_reason"] == "stop"
        assert row["reasoning_tokens"] + row["content_tokens"] + 1 == len(row["token_ids"])


def test_fc_054_stop_in_reasoning_cuts_there(run: Run) -> None:
    rows = run(sampling={"stop": ["*"]}, reasoning={"stop_in_reasoning": True})
    for row in rows:
        assert row["reasoning"].startswith("A:") and "*" not in row["reasoning"]
        assert (row["content"], row["reasoning_state"]) == ("", "unclosed")
        assert row["reasoning_tokens"] == len(row["token_ids"])


def test_stop_strings_come_from_a_column_too(run: Run) -> None:
    rows = run(reasoning={"budget": 4}, sampling={"stop": {"column": "stops"}})
    whole = run(reasoning={"budget": 4})
    assert rows[0]["content"] == "{" and rows[1]["content"] == whole[1]["content"]
    assert rows[2]["content"] == whole[2]["content"].split(", ")[0]


def test_fc_053_an_empty_stop_string_is_refused_by_name(run: Run) -> None:
    with pytest.raises(JobError, match=r"sampling\.stop"):
        run(sampling={"stop": [""]})


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_fc_058_logprobs_are_in_line_with_the_tokens(
    run: Run, tokenizer: Tokenizer, temperature: float
) -> None:
    sampling = {
        "logprobs": {"column": "top"}, "prompt_logprobs": 1, "temperature": temperature,
        "max_tokens": 30,
    }  # fmt: skip
    rows = run(sampling=sampling, reasoning={"budget": 5, "budget_message": " so"})
    for row, k in zip(rows, [2, None, 0], strict=True):
        if k is None:
            assert row["logprobs"] is None
        else:
            assert [entry[0]["token_id"] for entry in row["logprobs"]] == row["token_ids"]
            assert all(k <= len(entry) <= k + 1 for entry in row["logprobs"])
            assert all(one["logprob"] <= 0 for entry in row["logprobs"] for one in entry)
        assert row["prompt_logprobs"][0] is None
        ids = [entry[0]["token_id"] for entry in row["prompt_logprobs"][1:]]
        assert ids == row["prompt_token_ids"][1:]


def test_log_probability_columns_are_typed_and_only_there_when_asked(
    run: Run, tmp_path: Path
) -> None:
    run(sampling={"logprobs": 1, "max_tokens": 2})
    run(sampling={"max_tokens": 2})
    schema = pq.read_schema(tmp_path / "out0" / "part-00000.parquet")
    pair = pa.struct({"token_id": pa.int32(), "logprob": pa.float32()})
    assert schema.field("logprobs").type.value_type.value_type == pair
    assert "prompt_logprobs" not in schema.names
    assert "logprobs" not in pq.read_schema(tmp_path / "out1" / "part-00000.parquet").names


def test_fc_059_exact_mode_gives_the_same_logprobs_in_any_batch(run: Run) -> None:
    def values(rows: Rows) -> list[Any]:
        return [(row["token_ids"], row["logprobs"], row["prompt_logprobs"]) for row in rows]

    sampling = {"logprobs": 1, "prompt_logprobs": 1, "max_tokens": 12}
    whole = run(sampling=sampling, engine={"deterministic": True})
    for engine in (
        {"max_batched_tokens": 17},
        {"max_num_seqs": 1},
        {"prefix_caching": False, "max_batched_tokens": 64},
    ):
        rows = run(sampling=sampling, engine={"deterministic": True, **engine})
        assert values(rows) == values(whole)


@pytest.mark.parametrize("budget", [0, 1, 2, 7])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.5, "top_p": 0.9},
        {"temperature": 0.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1, "logprobs": 1},
        {"structured": {"json_schema": ANSWER}, "stop": ["no such text"]},
    ],
    ids=["greedy", "sampled", "penalties", "grammar"],
)
def test_fc_075_076_a_budget_is_exact_under_every_setting(
    run: Run, tokenizer: Tokenizer, budget: int, sampling: dict[str, Any]
) -> None:
    end = tokenizer.encode("</think>").tolist()
    rows = run(sampling={"max_tokens": 60, **sampling}, reasoning={"budget": budget})
    for row in rows:
        assert row["reasoning_state"] in ("budget", "closed")
        assert row["reasoning_tokens"] <= budget
        if row["reasoning_state"] == "budget":
            assert row["reasoning_tokens"] == budget
            assert row["token_ids"][budget : budget + 1] == end
    assert any(row["reasoning_state"] == "budget" for row in rows)


def test_a_budget_message_stands_in_the_reasoning(run: Run) -> None:
    rows = run(reasoning={"budget": 3, "budget_message": "\nenough\n"})
    for row in rows:
        assert row["reasoning"].endswith("\nenough\n") and row["reasoning_tokens"] == 3
        forced = len(row["token_ids"]) - row["reasoning_tokens"] - row["content_tokens"]
        assert forced > 1, "forced tokens are in neither count"


def test_a_budget_share_is_a_share_of_max_tokens(run: Run) -> None:
    rows = run(sampling={"max_tokens": 40}, reasoning={"budget_share": 0.25})
    assert {row["reasoning_tokens"] for row in rows} == {10}
    assert {row["reasoning_state"] for row in rows} == {"budget"}


@pytest.mark.parametrize(("thinking", "limit"), [(0, 8), (8, 8), (100, 8), (7, 8)])
def test_fc_080_budgets_at_the_edges(
    run: Run, thinking: int, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = run(sampling={"max_tokens": limit}, reasoning={"budget": thinking})
    for row in rows:
        assert row["reasoning_tokens"] == min(thinking, limit)
        assert len(row["token_ids"]) == limit and row["finish_reason"] == "length"
        state = "length" if thinking >= limit else "budget"
        assert row["reasoning_state"] == state
    warned = any("no room for an answer" in record.message for record in caplog.records)
    assert warned == (thinking + 1 >= limit)


def test_a_budget_for_a_model_without_reasoning_is_refused(run: Run) -> None:
    for field in ("budget", "budget_share", "loop_guard"):
        value = {"budget": 4, "budget_share": 0.5, "loop_guard": 3}[field]
        with pytest.raises(JobError, match=r"reasoning.* markers"):
            run(reasoning={field: value, "parser": "none"})


@pytest.mark.parametrize(
    ("sections", "right"),
    [
        ({"thinking": {"budgett": 128}}, "reasoning.budget"),
        ({"sampling": {"budget": 8}}, "reasoning.budget"),
        ({"sampling": {"thinking_budget": 8}}, "reasoning.budget"),
        ({"sampling": {"extra_body": {"thinking_token_budget": 8}}}, "reasoning.budget"),
        ({"reasoning": {"stop": ["x"]}}, "sampling.stop"),
        ({"sampling": {"reasoning_content": True}}, "called reasoning"),
    ],
)
def test_fc_079_a_value_in_the_wrong_place_is_refused_and_the_right_one_named(
    run: Run, sections: dict[str, Any], right: str
) -> None:
    with pytest.raises(JobError) as caught:
        run(**sections)
    assert right in str(caught.value)


def test_fc_083_the_loop_guard_ends_a_reasoning_that_runs_in_circles(
    run: Run, tokenizer: Tokenizer
) -> None:
    (letter,) = tokenizer.encode_plain("q").tolist()
    bias = {letter: 100.0}
    rows = run(sampling={"max_tokens": 40, "logit_bias": bias}, reasoning={"loop_guard": 6})
    for row in rows:
        assert (row["reasoning"], row["reasoning_state"]) == ("qqqqqq", "loop")
        assert row["reasoning_tokens"] == 6
    free = run(reasoning={"loop_guard": 50}, sampling={"max_tokens": 40})
    assert {row["reasoning_state"] for row in free} == {"length"}


def test_fc_090_a_schema_applies_after_the_reasoning_only(run: Run) -> None:
    sampling = {"structured": {"json_schema": ANSWER}}
    for row in run(sampling=sampling, reasoning={"budget": 4}):
        jsonschema.validate(json.loads(row["content"]), ANSWER)
        assert row["reasoning_state"] == "budget" and row["reasoning"].startswith("A:")
        assert row["finish_reason"] == "stop"


def test_a_schema_may_come_from_a_column_and_an_impossible_one_fails_its_row(run: Run) -> None:
    structured = {"json_schema": {"column": "schema"}}
    rows = run(sampling={"structured": structured}, reasoning={"budget": 2})
    jsonschema.validate(json.loads(rows[0]["content"]), ANSWER)
    assert rows[1]["error"].startswith("sampling.structured.json_schema")
    assert "minimum (5)" in rows[1]["error"] and rows[1]["content"] is None
    assert rows[2]["error"] is None, "null is no schema"
    rows = run(sampling={"structured": {"column": "shape"}}, reasoning={"budget": 2})
    assert rows[0]["content"].isdigit() and len(rows[0]["content"]) == 2
    assert rows[1]["content"] == "yes" and rows[2]["error"] is None


def test_an_impossible_schema_of_the_job_is_refused_before_weights_load(run: Run) -> None:
    with pytest.raises(JobError, match=r"sampling\.structured\.json_schema: Unsatisfiable"):
        run(
            sampling={"structured": {"json_schema": IMPOSSIBLE}},
            model={"path": "builtin:tally", "memory_utilization": 1e-9},  # would not fit
        )


@pytest.mark.parametrize(
    "structured", [{"regex": "a"}, {"regex": {"column": "text"}}, {"column": "shape"}]
)
def test_a_missing_library_is_named_before_weights_load(
    run: Run, structured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(JobError, match=r"sampling\.structured.*pip install"):
        run(sampling={"structured": structured})


def test_a_grammar_cut_by_max_tokens_says_length(run: Run) -> None:
    sampling = {"structured": {"json_schema": ANSWER}, "max_tokens": 10}
    for row in run(sampling=sampling, reasoning={"budget": 4}):
        assert row["finish_reason"] == "length" and row["content"].startswith("{")


def test_markers_of_plain_text_cannot_keep_stops_and_grammars_out(run: Run) -> None:
    own = {"start": "A:", "end": "=="}
    with pytest.raises(JobError, match=r"sampling\.stop: .*stop_in_reasoning: true"):
        run(sampling={"stop": ["x"]}, reasoning=own)
    with pytest.raises(JobError, match=r"sampling\.structured: the markers"):
        run(sampling={"structured": {"regex": "x"}}, reasoning=own)


def test_penalties_bans_and_biases_reach_the_model(run: Run, tokenizer: Tokenizer) -> None:
    plain = run(sampling={"max_tokens": 40})
    rows = run(sampling={"max_tokens": 40, "frequency_penalty": {"column": "penalty"}})
    assert rows[0]["token_ids"] == plain[0]["token_ids"]
    assert rows[1]["token_ids"] != plain[1]["token_ids"]
    assert rows[2]["token_ids"] == plain[2]["token_ids"]
    banned = run(sampling={"max_tokens": 40, "bad_words": ["=", "*"]})
    for row, full in zip(banned, plain, strict=True):
        text = row["reasoning"] + row["content"]
        assert "*" in full["reasoning"] and "=" not in text and "*" not in text
    (digit,) = tokenizer.encode_plain("7").tolist()
    biased = run(sampling={"max_tokens": 5, "logit_bias": {digit: 100}})
    assert all(np.array_equal(row["token_ids"], [digit] * 5) for row in biased)
    with pytest.raises(JobError, match=r"sampling\.logit_bias: 100000 is no token of the model"):
        run(sampling={"logit_bias": {100000: 1}})
