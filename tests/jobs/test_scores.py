"""Columns of log-probabilities: what the engine gives is what every output format holds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.core import Logprobs
from batchmla.jobs.columns import SCORES, Finished, finished_table, own_schema, scores_array
from batchmla.jobs.run import run_job
from batchmla.jobs.spec import build_spec

Entry = tuple[int, float]
ENTRIES = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-(2.0**90), 0, width=32)), max_size=3
)


def logprobs(positions: list[list[Entry]]) -> Logprobs:
    flat = [entry for position in positions for entry in position]
    return Logprobs(
        token_ids=np.array([token_id for token_id, _ in flat], np.int32),
        values=np.array([value for _, value in flat], np.float32),
        ends=np.cumsum([len(position) for position in positions], dtype=np.int32),
    )


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.one_of(st.none(), st.lists(ENTRIES, max_size=4)), max_size=5))
def test_positions_without_entries_and_rows_without_scores_are_null(
    rows: list[list[list[Entry]] | None],
) -> None:
    array = scores_array([None if row is None else logprobs(row) for row in rows])
    assert array.type == own_schema(False, scores=SCORES).field("logprobs").type
    want = [
        None
        if row is None
        else [[{"token_id": i, "logprob": v} for i, v in each] if each else None for each in row]
        for row in rows
    ]
    assert array.to_pylist() == want
    array.validate(full=True)


def test_a_table_of_finished_rows_has_the_columns_that_are_asked_for() -> None:
    scores = logprobs([[], [(3, -0.5)]])
    rows = [
        Finished(0, 0, 0, "a", prompt_logprobs=scores, finish_reason="stop"),
        Finished(1, 0, 1, "b", error="no"),
    ]
    table = finished_table(rows, False, ("prompt_logprobs",))
    assert "logprobs" not in table.column_names
    want = [[None, [{"token_id": 3, "logprob": -0.5}]], None]
    assert table.column("prompt_logprobs").to_pylist() == want


def job(folder: Path, name: str, form: str) -> Any:
    documents = [f"Receipt\n{n} x lamp @ 12.50" for n in range(1, 5)]
    pq.write_table(pa.table({"doc": list("abcd"), "text": documents}), folder / "in.parquet")
    return build_spec(
        {
            "model": {"path": "builtin:tally"},
            "input": {"path": str(folder / "in.parquet"), "id": "doc"},
            "prompt": {"user": "{{ text }}"},
            "sampling": {
                "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 14, "temperature": 0.8,
                "stop": ["total"], "structured": {"regex": "[a-z]{3}"}, "seed": 3,
            },
            "reasoning": {"budget": 6, "budget_message": " so"},
            "engine": {"deterministic": True},
            "output": {"path": str(folder / name), "format": form, "token_ids": True},
        }
    )  # fmt: skip


def test_a_job_goes_on_where_it_stopped_and_lines_hold_what_parquet_holds(tmp_path: Path) -> None:
    run_job(job(tmp_path, "whole", "parquet"), progress="off")
    whole = pq.read_table(tmp_path / "whole").to_pylist()
    for limit in (2, None):
        run_job(job(tmp_path, "parts", "parquet"), progress="off", limit=limit)
    assert pq.read_table(tmp_path / "parts").to_pylist() == whole
    run_job(job(tmp_path, "lines", "jsonl"), progress="off")
    lines = (tmp_path / "lines" / "part-00000.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [row["logprobs"] for row in found] == [row["logprobs"] for row in whole]
    assert [row["prompt_logprobs"] for row in found] == [row["prompt_logprobs"] for row in whole]
    for row in whole:
        assert len(row["logprobs"]) == len(row["token_ids"]) > 6
        assert row["reasoning_state"] == "budget" and row["reasoning_tokens"] == 6
        assert len(row["content"]) == 3 and row["content"].islower()
