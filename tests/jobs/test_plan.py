"""What `plan` says of R1 from its config alone, and of a model that is all there."""

import gc
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from published import DEEPSEEK_R1
from rich.console import Console

from batchmla.engine.hardware import detect
from batchmla.errors import JobError
from batchmla.jobs.inspect import gib
from batchmla.jobs.local import local_text
from batchmla.jobs.plan import Plan, plan_job
from batchmla.jobs.plan_view import print_plan
from batchmla.jobs.read import open_input
from batchmla.jobs.spec import LoadedSpec, build_spec

CONTRACT = (
    "attention", "weights_bytes", "workspace_bytes", "kv_pool_bytes", "kv_bytes_per_token",
    "kv_bytes_at", "max_concurrency", "kv_capacity_tokens", "rows", "prompt_tokens",
    "rows_too_long", "predicted_seconds",
)  # fmt: skip
TALLY_CONTEXT = 2048


def job_on(
    model: str,
    folder: Path,
    texts: list[Any],
    device: str = "cpu",
    max_model_len: int | str = "auto",
    dtype: str = "auto",
    tensor: int = 1,
    **sections: Any,
) -> LoadedSpec:
    """A job over a small Parquet file."""
    source = folder / "in.parquet"
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), source)
    return build_spec(
        {
            "model": {
                "path": model,
                "device": device,
                "max_model_len": max_model_len,
                "dtype": dtype,
                "parallel": {"tensor": tensor},
            },
            "input": {"path": str(source)},
            "prompt": {"user": "{{ text }}"},
            "output": {"path": str(folder / "out")},
            **sections,
        }
    )


@pytest.fixture
def r1_folder(tmp_path: Path) -> str:
    folder = tmp_path / "r1"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_R1))
    return str(folder)


@pytest.fixture
def r1(r1_folder: str, tmp_path: Path) -> LoadedSpec:
    return job_on(r1_folder, tmp_path, ["a", "b", "c"])


def shown(plan: Plan) -> str:
    stream = io.StringIO()
    print_plan(plan, Console(file=stream, width=200))
    return stream.getvalue()


def test_r1_takes_the_published_bytes_and_does_not_fit_here(r1: LoadedSpec) -> None:
    if detect("cpu").memory_bytes > 1200e9:
        pytest.skip("this machine has room for R1")
    plan = plan_job(r1)
    assert plan.kv_bytes_per_token == 61 * (512 + 64) * 2 == 70_272
    assert plan.kv_bytes_at["32768"] == 2_302_672_896
    assert list(plan.kv_bytes_at) == ["4096", "32768", "40960", "131072", "163840"]
    assert list(plan.max_concurrency) == list(plan.kv_bytes_at)
    assert plan.attention == {"mla": 61} and plan.max_model_len == 163_840
    assert not plan.fits and plan.misfit
    text = shown(plan)
    assert f"does not fit: {plan.misfit}" in text
    for words in ("weights", "workspace (estimate)", "KV pool", "left to others", "device",
                  gib(plan.weights_bytes), gib(plan.memory_bytes), "32,768", "2,302,672,896",
                  "70,272 bytes per token", "input: 3 rows"):  # fmt: skip
        assert words in text


def test_what_a_folder_without_a_tokenizer_cannot_tell_is_null_with_a_note(r1: LoadedSpec) -> None:
    said = plan_job(r1).to_json()
    assert said["rows"] == 3
    for name in ("prompt_tokens", "rows_too_long", "longest_prompt", "predicted_seconds"):
        assert said[name] is None
    assert any("no tokenizer in the model folder: prompts" in each for each in said["notes"])
    assert any("weights stay in fp8 as published" in note for note in said["notes"])
    assert set(CONTRACT) <= set(said)
    assert json.loads(json.dumps(said, allow_nan=False)) == said


def test_r1_fits_two_nodes_of_h200(r1_folder: str, tmp_path: Path) -> None:
    plan = plan_job(job_on(r1_folder, tmp_path, ["a"], device="auto", tensor=16), "16xH200")
    assert plan.fits and plan.misfit is None and "H200" in plan.hardware
    assert plan.kv_bytes_per_token == 70_272
    assert 671e9 / 16 < plan.weights_bytes < 1.15 * 671e9 / 16
    assert plan.kv_capacity_tokens > 163_840
    assert plan.kv_pool_bytes >= plan.kv_capacity_tokens * 70_272
    taken = plan.weights_bytes + plan.workspace_bytes + plan.driver_bytes + plan.kv_pool_bytes
    assert plan.driver_bytes > 0 and taken <= plan.memory_bytes - plan.reserve_bytes
    assert "it fits" in shown(plan)


def test_a_dtype_by_name_expands_quantised_weights(r1_folder: str, tmp_path: Path) -> None:
    loaded = job_on(r1_folder, tmp_path, ["a"], device="auto", dtype="bfloat16", tensor=16)
    plan = plan_job(loaded, "16xH200")
    assert 671e9 * 2 / 16 < plan.weights_bytes < 1.15 * 671e9 * 2 / 16
    assert any("in fp8 and expanded to bfloat16" in note for note in plan.notes)


def test_a_rank_whose_columns_end_inside_a_block_is_refused(r1_folder: str, tmp_path: Path) -> None:
    loaded = job_on(r1_folder, tmp_path, ["a"], device="auto", tensor=32)
    with pytest.raises(JobError, match=r"576 of the 18432 columns .* share a scale; choose"):
        plan_job(loaded, "32xH200")


def lengths_of(loaded: LoadedSpec) -> list[int]:
    """Tokens of each prompt, rendered apart from `plan`."""
    table = open_input(loaded.spec.input)
    table.scan("full")
    text = local_text(loaded.spec, table, 10**6)
    return [len(made.token_ids) for rows in table.rows(0, None) for made in text.prompts(rows)]


def test_tally_rows_and_their_tokens_are_counted_exactly(tmp_path: Path) -> None:
    texts = ["one two", "three", "one " * 600, "word " * 5000, "x", None]
    lengths = lengths_of(job_on("builtin:tally", tmp_path, texts[:5]))
    long = [length for length in lengths if length >= TALLY_CONTEXT]
    good = [length for length in lengths if length < TALLY_CONTEXT]
    assert len(long) == 1 and max(good) + 500 > TALLY_CONTEXT, "the texts test both limits"
    loaded = job_on("builtin:tally", tmp_path, texts, sampling={"max_tokens": 500})
    plan = plan_job(loaded)
    assert plan.max_model_len == TALLY_CONTEXT
    assert (plan.rows, plan.rows_too_long, plan.rows_failing) == (6, len(long), len(long) + 1)
    assert plan.prompt_tokens == sum(good) and plan.longest_prompt == max(good)
    assert plan.predicted_output_tokens == sum(min(500, TALLY_CONTEXT - each) for each in good)
    assert plan.fits and plan.predicted_seconds is not None and plan.predicted_seconds > 0
    assert set(CONTRACT) <= set(plan.to_json())
    assert f"rows too long: {len(long)}; rows that will fail: {len(long) + 1}" in shown(plan)


def test_output_is_bounded_by_the_context(tmp_path: Path) -> None:
    texts = ["one two", "three four five"]
    lengths = lengths_of(job_on("builtin:tally", tmp_path, texts))
    room = sum(TALLY_CONTEXT - each for each in lengths)
    for most in (None, 10**6):
        sampling = {} if most is None else {"max_tokens": most}
        plan = plan_job(job_on("builtin:tally", tmp_path, texts, sampling=sampling))
        assert plan.predicted_output_tokens == room
        note = next(note for note in plan.notes if "output tokens" in note)
        assert note.startswith(f"at most {room:,} output tokens")
        assert ("sampling.max_tokens is null" in note) == (most is None)
    short = job_on("builtin:tally", tmp_path, texts, max_model_len=64)
    assert plan_job(short).predicted_output_tokens == sum(64 - each for each in lengths)


def test_a_plan_allocates_no_model(r1: LoadedSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    made: list[int] = []
    plain = torch.empty

    def counted(*sizes: Any, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = plain(*sizes, **options)
        if tensor.device.type != "meta":
            made.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    plan_job(r1)  # imports are no part of it
    made.clear()
    gc.collect()
    tracemalloc.start()
    plan = plan_job(r1)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.weights_bytes > 671 * 10**9
    assert peak_bytes < 64 * 2**20 and sum(made) < 2**20


def test_replicas_are_said_to_share_the_rows(tmp_path: Path) -> None:
    executor = {"kind": "ray", "replicas": {"min": 2, "max": 5}}
    plan = plan_job(job_on("builtin:tally", tmp_path, ["2 pens"], executor=executor))
    assert "sizes and time are those of one replica; 2 to 5 share the rows" in plan.notes
