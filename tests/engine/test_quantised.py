"""An engine on a quantised checkpoint: what it keeps, what it counts, what it generates."""

from pathlib import Path

import numpy as np
import pytest
from fakes import ListSource, make_prompt
from quantised import WAYS, write_quantised
from tiny import read_config

from batchmla.core import EngineOptions, SamplingParams
from batchmla.engine.engine import load_engine, plan_engine
from batchmla.engine.hardware import detect
from batchmla.engine.numerics import describe_numerics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantised(tmp_path_factory.mktemp("v3"), WAYS["v3 wide fp8"]).quantised


def generate(folder: Path, **options: object) -> dict[int, list[int]]:
    """Greedy ids by row."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    texts = [rng.integers(2, 256, length).tolist() for length in (1, 9, 40, 70)]
    prompts = [make_prompt(index, ids, params) for index, ids in enumerate(texts)]
    chosen = EngineOptions(model=str(folder), device="cpu", **options)  # type: ignore[arg-type]
    engine = load_engine(chosen)
    found = {done.index: done.token_ids.tolist() for done in engine.generate(ListSource(prompts))}
    engine.close()
    return found


@pytest.mark.parametrize("deterministic", [False, True])
def test_kept_and_expanded_weights_generate_alike(folder: Path, deterministic: bool) -> None:
    named = "bfloat16" if detect("cpu").has_fast_bf16 else "float32"  # what auto computes in
    kept = generate(folder, deterministic=deterministic)
    assert kept == generate(folder, dtype=named, deterministic=deterministic)
    assert [len(ids) for ids in kept.values()] == [8] * 4


def test_a_plan_counts_what_is_kept(folder: Path) -> None:
    raw, machine = read_config(folder), detect("cpu")
    kept, expanded = (
        plan_engine(raw, EngineOptions(model=str(folder), device="cpu", dtype=dtype), machine)
        for dtype in ("auto", "bfloat16")
    )
    assert kept.keeps_quantised and not expanded.keeps_quantised
    assert kept.memory.weights_bytes < 0.75 * expanded.memory.weights_bytes


def test_a_resume_in_exact_mode_sees_which_weights_were_kept(folder: Path) -> None:
    raw, machine = read_config(folder), detect("cpu")
    kept, expanded = (
        describe_numerics(
            plan_engine(raw, EngineOptions(model=str(folder), device="cpu", dtype=dtype), machine),
            machine,
        )
        for dtype in ("auto", "bfloat16")
    )
    assert kept["weights"] == "kept quantised" and "weights" not in expanded
