"""The example of an OpenAI batch file: run as its page says."""

import json
from pathlib import Path

import pytest

from batchmla.jobs.run import run_job
from batchmla.jobs.spec import load_spec

ROOT = Path(__file__).resolve().parents[2]


def test_every_request_has_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loaded = load_spec("examples/openai_batch/job.yaml", [f"output.path={tmp_path / 'results'}"])
    summary = run_job(loaded, progress="off")
    assert (summary.exit_code, summary.done, summary.failed) == (0, 6, 1)
    source = Path("examples/openai_batch/requests.jsonl")
    asked = [json.loads(line) for line in source.open(encoding="utf-8")]
    results = [json.loads(line) for line in (tmp_path / "results" / "part-00000.jsonl").open("rb")]
    assert [one["custom_id"] for one in results] == [one["custom_id"] for one in asked]
    for request, result in zip(asked[:5], results, strict=False):
        assert result["error"] is None and result["response"]["status_code"] == 200
        body = result["response"]["body"]
        (choice,) = body["choices"]
        assert choice["message"]["reasoning"], request["custom_id"]
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 150
    cut = results[4]["response"]["body"]
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 20
    assert results[5]["response"] is None
    assert results[5]["error"]["message"].startswith("body.logprobs: true is not built yet")
