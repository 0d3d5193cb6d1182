"""Field cases of what a checkpoint says of sampling, ends of text and defaults; poor weights."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
import torch
from damage import change_tensor, edit_json, whole
from echo_job import EchoEngine, EchoJob
from fakes import FakeModel, ListSource, fake_layout, greedy_ids
from typer.testing import CliRunner

from batchmla.cli import app
from batchmla.core import Completion, FinishReason
from batchmla.engine.engine import EngineCore
from batchmla.engine.forward import Forward
from batchmla.engine.group import Limits
from batchmla.jobs.local import local_text
from batchmla.jobs.read import open_job_input
from batchmla.jobs.spec import build_spec
from batchmla.kernels.cpu.sample import sample

TEXT = "Say the word 7."


@pytest.fixture
def job(tmp_path: Path) -> EchoJob:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"id": "a", "prompt": TEXT}) + "\n")
    return EchoJob(tmp_path, source)


def say(folder: Path, **generation: Any) -> None:
    """What generation_config.json holds."""
    (folder / "model" / "generation_config.json").write_text(json.dumps(generation))


def answer(tmp_path: Path, **sampling: Any) -> tuple[Completion, list[int]]:
    """The completion of the real engine's loop over a scripted model, and what that would say
    without an end."""
    spec = build_spec(
        {
            "model": {"path": str(tmp_path / "model")},
            "input": {"path": str(tmp_path / "in.jsonl")},
            "prompt": {"raw": "prompt"},
            "sampling": {"temperature": 0, "max_tokens": 40, **sampling},
            "output": {"path": str(tmp_path / "out")},
        }
    ).spec
    table = open_job_input(spec)
    table.scan("full")
    text = local_text(spec, table, 1024)
    (prompt,) = text.prompts(next(table.rows(0, None)))
    assert not isinstance(prompt, str)
    vocab = len(text.tokenizer)
    layout, cpu = fake_layout(), torch.device("cpu")
    engine = EngineCore(
        Forward(FakeModel(vocab), layout, 256, 1, cpu),
        layout,
        num_pages=256,
        limits=Limits(max_num_seqs=1, max_batched_tokens=64, max_model_len=1024),
        sample=sample,
        vocab_limit=vocab,
        device=cpu,
    )
    (completion,) = engine.generate(ListSource([prompt]))
    return completion, greedy_ids(prompt.token_ids, 40, vocab)


def test_fc_129_every_id_of_a_list_ends_the_text_and_sources_are_joined(
    job: EchoJob, tmp_path: Path
) -> None:
    free, said = answer(tmp_path, ignore_eos=True)
    assert free.finish_reason is FinishReason.LENGTH and free.token_ids.tolist() == said
    first, second = said[4], said[9]
    assert first not in said[:4] and second not in said[:9]
    for listed in ([1, first, second], [first, second], first):
        say(tmp_path, eos_token_id=listed)
        ended, _ = answer(tmp_path)
        assert ended.finish_reason is FinishReason.STOP and ended.token_ids.tolist() == said[:4]
    say(tmp_path, eos_token_id=[second])
    edit_json(tmp_path / "model" / "config.json", lambda raw: raw.update(eos_token_id=[2, first]))
    ended, _ = answer(tmp_path)
    assert ended.token_ids.tolist() == said[:4], "config.json's list counts beside the other"
    inside = {"eos_token_id": 1, "text_config": {"eos_token_id": [2, first]}}
    edit_json(tmp_path / "model" / "config.json", lambda raw: raw.update(inside))
    ended, _ = answer(tmp_path)
    assert ended.token_ids.tolist() == said[:4], "so does that of a text model inside another"
    inside = {"eos_token_id": 1, "text_config": {}}
    edit_json(tmp_path / "model" / "config.json", lambda raw: raw.update(inside))
    ended, _ = answer(tmp_path, stop_token_ids=[said[20]])
    assert ended.token_ids.tolist() == said[:9], "the job's ids drop none of the model's"
    say(tmp_path, eos_token_id=[first, second])
    ended, _ = answer(tmp_path, ignore_eos=True)
    assert ended.token_ids.tolist() == said, "ignore_eos ignores them all"
    ended, _ = answer(tmp_path, ignore_eos=True, stop_token_ids=[said[20]])
    assert ended.token_ids.tolist() == said[: said.index(said[20])]


@pytest.mark.parametrize(
    ("generation", "sampling", "value", "source"),
    [
        ({"temperature": 0.6}, {}, 0.6, "generation_config"),
        ({"temperature": 0.6}, {"temperature": 0}, 0.0, "job"),
        ({"temperature": 0.6}, {"temperature": 0.9}, 0.9, "job"),
        ({"temperature": 0.6, "do_sample": False}, {}, 0.0, "generation_config"),
        ({}, {}, 1.0, "default"),
    ],
)
def test_fc_131_values_in_force_are_printed_and_stored_with_their_source(
    job: EchoJob,
    tmp_path: Path,
    generation: dict[str, Any],
    sampling: dict[str, Any],
    value: float,
    source: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    say(tmp_path, **generation)
    with caplog.at_level(logging.INFO):
        job.run(EchoEngine(), sampling=sampling)
    stored = json.loads((job.output / "_batchmla" / "summary.json").read_text())
    assert stored["effective"]["sampling.temperature"] == {"value": value, "source": source}
    assert f"temperature {value} ({source})" in caplog.text
    assert f"temperature {value} ({source})" in (job.output / "_batchmla" / "run.log").read_text()


POOR = "model.layers.2.mlp.shared_experts.down_proj.weight"


def run_poor(
    tmp_path: Path, *flags: str, num_rows: int = 6, stop_after: int = 1000
) -> tuple[Any, list[Any]]:
    """A whole job whose model has one weight that is no number; what was said, and the rows."""
    folder = whole(tmp_path / "model", num_shards=1)

    def spoil(weight: torch.Tensor) -> torch.Tensor:
        weight[0, 0] = torch.nan
        return weight

    change_tensor(folder, POOR, spoil)
    lines = [json.dumps({"id": f"r{n}", "text": f"{n} pens at 1.20"}) for n in range(num_rows)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    job = {
        "model": {"path": str(folder), "device": "cpu"},
        "input": {"path": str(tmp_path / "in.jsonl")},
        "prompt": {"user": "{{ text }}"},
        "sampling": {"max_tokens": 4},
        "engine": {"max_num_seqs": 2},
        "errors": {"stop_after": stop_after},
        "output": {"path": str(tmp_path / "out")},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = CliRunner().invoke(app, ["run", str(tmp_path / "job.yaml"), *flags])
    parts = list((tmp_path / "out").glob("part-*"))
    return done, ds.dataset(parts).to_table().to_pylist() if parts else []


def test_fc_171_a_weight_that_is_no_number_fails_every_row_and_the_job(tmp_path: Path) -> None:
    done, rows = run_poor(tmp_path)
    assert done.exit_code == 1 and not (tmp_path / "out" / "_SUCCESS").exists()
    assert len(rows) == 6
    for row in rows:
        assert "logits that are not finite" in row["error"] and row["content"] is None
        assert row["content_tokens"] in (0, None) and row["finish_reason"] == "error"


def test_fc_171_a_job_whose_first_rows_all_fail_so_stops(tmp_path: Path) -> None:
    done, _ = run_poor(tmp_path, num_rows=400, stop_after=2)
    assert done.exit_code == 1
    summary = json.loads((tmp_path / "out" / "_batchmla" / "summary.json").read_text())
    assert 2 <= summary["failed"] == summary["done"] < 400
    assert "errors.stop_after" in done.stderr


def test_fc_171_the_layer_is_named_once_where_debugging_is_on(tmp_path: Path) -> None:
    done, _ = run_poor(tmp_path, "--debug")
    named = re.findall(r"layer (\d+) gave values that are not finite", done.stderr)
    assert named == ["2"], done.stderr
