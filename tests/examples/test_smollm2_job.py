"""The SmolLM2 example's job file, run by the command line on a few of its rows."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import smollm2

ROOT = smollm2.EXAMPLE.parents[1]
CODE = {
    "m.add": "def add(a, b):\n    total = a + b\n    return total",
    "m.evens": "def evens(values):\n    return [value for value in values if value % 2 == 0]",
    "m.head": "def head(path):\n    with open(path) as file:\n        return file.readline()",
}


def test_the_job_writes_one_sentence_for_each_function(tmp_path: Path) -> None:
    folder = smollm2.model_folder()
    schema = smollm2.script("make_data").SCHEMA
    rows = [
        {"id": key, "module": "m", "name": key[2:], "code": code, "docstring": f"about {key}"}
        for key, code in CODE.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "functions.parquet")
    command = [sys.executable, "-P", "-m", "batchmla", "run", "examples/smollm2/job.yaml", "--json"]
    for override in (
        f"model.path={folder}",
        f"input.path={tmp_path / 'functions.parquet'}",
        f"output.path={tmp_path / 'out'}",
        "output.token_ids=true",
    ):
        command += ["--set", override]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["done"], summary["failed"]) == (3, 3, 0)

    assert (tmp_path / "out" / "_SUCCESS").exists()
    output = ds.dataset(tmp_path / "out", format="parquet").to_table().to_pylist()
    assert [row["row_id"] for row in output] == list(CODE)
    for row in output:
        assert row["docstring"] == f"about {row['row_id']}"  # carried
        assert "code" not in row  # not asked for
        assert row["error"] is None
        assert row["reasoning"] is None
        assert row["finish_reason"] == "stop"
        assert 5 <= row["content_tokens"] == len(row["token_ids"]) < 48
        assert row["content"].endswith(".")
        assert "\n" not in row["content"]
        assert row["prompt_token_ids"][0] == 1  # <|im_start|>
        assert row["prompt_token_ids"].count(2) == 2  # <|im_end|>: the system's and the user's
