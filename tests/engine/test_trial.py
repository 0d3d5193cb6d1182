"""A trial of a real engine: which steps it takes, and that its times tell those of others."""

from pathlib import Path

import numpy as np
from fakes import ListSource, make_prompt
from tiny import read_config, write_tiny

from batchmla.core import EngineOptions, SamplingParams
from batchmla.engine.drafts import engine_costs
from batchmla.engine.engine import load_engine, plan_engine
from batchmla.engine.hardware import detect
from batchmla.engine.trial import trial, trial_sizes


def test_a_trial_times_steps_of_every_size(tmp_path: Path) -> None:
    write_tiny(tmp_path, "v3")
    options = EngineOptions(
        model=str(tmp_path), device="cpu", dtype="float32", max_num_seqs=16,
        max_batched_tokens=128, max_model_len=256,
    )  # fmt: skip
    raw = read_config(tmp_path)
    config = plan_engine(raw, options, detect("cpu"))
    costs, engine = engine_costs(raw, config), load_engine(options)
    text = np.random.default_rng(1).integers(2, 200, 500).astype(np.int32)
    times = trial(engine, config, costs, token_ids=text, prompt_tokens=40, limit_s=0.0)
    assert times is not None and times.seconds is not None
    assert times.fixed_s > 0 or times.weight_byte_s > 0
    assert times.loop_share >= 0
    sizes = {each.work.tokens for each in engine.meter.samples}
    assert {1, 4, 16, 128} <= sizes and max(sizes) == 128
    engine.meter.forget()
    rng = np.random.default_rng(2)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    prompts = [make_prompt(n, rng.integers(2, 200, 30).tolist(), params) for n in range(12)]
    assert all(each.error is None for each in engine.generate(ListSource(prompts)))
    ratios = [each.seconds / times.seconds(each.work, costs) for each in engine.meter.samples]
    assert 0.2 < float(np.median(ratios)) < 5, "not even the order of magnitude, on a busy machine"
    engine.close()


def test_sizes_stay_within_the_engine(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    for seqs, tokens, length, pool in ((1, 1, 16, 64), (128, 1024, 200, 4096), (7, 64, 64, 256)):
        options = EngineOptions(
            model=str(tmp_path), device="cpu", max_num_seqs=seqs, max_batched_tokens=tokens,
            max_model_len=length, kv_pool_tokens=pool,
        )  # fmt: skip
        config = plan_engine(read_config(tmp_path), options, detect("cpu"))
        for rows, prompt, new in trial_sizes(config, prompt_tokens=10_000):
            assert 1 <= rows <= max(seqs, 1) and prompt >= 1 and prompt + new <= length
            assert rows == 1 or rows * (prompt + new) <= pool
