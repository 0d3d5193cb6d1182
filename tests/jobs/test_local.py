"""A job on this machine's engine: what is wrong with the model is found before anything is
written."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from typer.testing import CliRunner, Result

from batchmla.cli import app

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(str(files("batchmla.builtin") / "tally"), tmp_path / "model"))


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "text": "2 pens at 1.20"}\n')
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {{path: {model}}}\n"
        f"input: {{path: {tmp_path / 'in.jsonl'}}}\n"
        'prompt: {user: "{{ text }}"}\n'
        "sampling: {max_tokens: 2}\n"
        f"output: {{path: {tmp_path / 'runs' / 'out'}}}\n"
    )
    return path


def run(job: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["run", str(job), *flags])


def break_weights(model: Path, how: str) -> str:
    """Damages a model and returns the word by which the error must name it."""
    weights, config = model / WEIGHTS, model / "config.json"
    if how == "missing":
        weights.unlink()
        return "has no weights"
    if how == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        return "git lfs pull"
    if how == "cut off":
        weights.write_bytes(weights.read_bytes()[:-10])
        return "cut off"
    raw = json.loads(config.read_text())
    if how == "misshaped":
        config.write_text(json.dumps(raw | {"moe_intermediate_size": 16}))
        return "has shape"
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if how == "other quantisation":
        said = {"quant_method": "gptq", "bits": 4}
    config.write_text(json.dumps(raw | {"quantization_config": said}))
    return "no weight is quantised" if how == "quantised" else "the quant_method gptq cannot be"


BROKEN = ("missing", "pointer", "cut off", "misshaped", "quantised", "other quantisation")


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_model_leaves_nothing_and_repaired_it_runs(
    tmp_path: Path, model: Path, job: Path, how: str
) -> None:
    shutil.copytree(model, tmp_path / "whole")
    word = break_weights(model, how)
    done = run(job)
    assert done.exit_code == 2, done.output
    assert word in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()
    shutil.rmtree(model)
    shutil.copytree(tmp_path / "whole", model)
    assert run(job).exit_code == 0
    assert ds.dataset(tmp_path / "runs" / "out").count_rows() == 1


def test_a_model_that_does_not_fit_is_refused_before_the_manifest(
    tmp_path: Path, job: Path
) -> None:
    done = run(job, "--set", "model.memory_utilization=1e-9")
    assert done.exit_code == 3, done.output
    assert not (tmp_path / "runs").exists()
    assert run(job, "--set", "model.kv_cache_dtype=float32").exit_code == 0


def test_fresh_deletes_nothing_when_the_new_run_cannot_begin(
    tmp_path: Path, model: Path, job: Path
) -> None:
    assert run(job).exit_code == 0
    output = tmp_path / "runs" / "out"
    before = ds.dataset(output).to_table()
    break_weights(model, "cut off")
    assert run(job, "--fresh").exit_code == 2
    assert (output / "_SUCCESS").exists()
    assert ds.dataset(output).to_table().equals(before)


def test_files_of_others_stay_when_a_run_is_refused(tmp_path: Path, model: Path, job: Path) -> None:
    output = tmp_path / "runs" / "out"
    output.mkdir(parents=True)
    (output / "notes.txt").write_text("mine")
    break_weights(model, "missing")
    assert run(job).exit_code == 2
    assert [path.name for path in output.iterdir()] == ["notes.txt"]


def test_an_input_without_rows_needs_no_weights(tmp_path: Path, model: Path, job: Path) -> None:
    (tmp_path / "in.jsonl").write_text("")
    (model / WEIGHTS).unlink()
    done = run(job)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs" / "out" / "_SUCCESS").exists()
