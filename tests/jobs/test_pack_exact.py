"""Packing changes no id in exact mode, and a packed job finds its prefixes in the cache."""

from pathlib import Path

import numpy as np
from tiny import write_tiny

from batchmla.core import EngineOptions, EngineStats, Prompt, SamplingParams
from batchmla.engine.engine import load_engine
from batchmla.jobs.pack import Packer
from batchmla.jobs.pack_twins import Waiting

NUM_ROWS = 30


def make_prompts() -> list[Prompt]:
    """Three system prompts interleaved; every second row is drawn, some are the same."""
    rng = np.random.default_rng(5)
    systems = [rng.integers(2, 250, length).astype(np.int32) for length in (64, 40, 100)]
    prompts = []
    for index in range(NUM_ROWS):
        own = rng.integers(2, 250, int(rng.integers(1, 60))).astype(np.int32)
        ids = np.concatenate([systems[rng.integers(3)], own])
        if index % 10 == 8:
            ids = prompts[index - 2].token_ids.copy()
        params = SamplingParams(
            temperature=0.0 if index % 2 == 0 else 0.9, max_tokens=int(rng.integers(1, 3)) * 4
        )
        if index % 10 == 8:
            params = prompts[index - 2].params
        prompts.append(
            Prompt(
                row_id=str(index), index=index, params=params, token_ids=ids, stream_key=900 + index
            )
        )
    return prompts


def run(
    folder: Path, order: str, *, dedupe: bool, prefix_caching: bool
) -> tuple[dict[int, list[int]], EngineStats, Packer]:
    """Ids by row."""
    options = EngineOptions(
        model=str(folder), device="cpu", dtype="float32", deterministic=True, block_size=8,
        max_model_len=240, kv_pool_tokens=480, max_num_seqs=6, max_batched_tokens=48,
        prefix_caching=prefix_caching,
    )  # fmt: skip
    engine = load_engine(options)
    packer = Packer(order=order, window_rows=1000, dedupe=dedupe)  # type: ignore[arg-type]
    packer.put([Waiting(each, 0, each.index) for each in make_prompts()])
    packer.end()
    found: dict[int, list[int]] = {}
    for completion in engine.generate(packer):
        packer.learn(completion)
        for _, each in packer.finish([completion]):
            assert each.error is None and each.index not in found
            found[each.index] = each.token_ids.tolist()
    return found, engine.stats(), packer


def test_packed_rows_get_the_ids_of_input_order_without_a_cache(tmp_path: Path) -> None:
    write_tiny(tmp_path, "v3")
    plain, _, _ = run(tmp_path, "input", dedupe=False, prefix_caching=False)
    cached, by_input, _ = run(tmp_path, "input", dedupe=False, prefix_caching=True)
    packed, by_prefix, packer = run(tmp_path, "auto", dedupe=True, prefix_caching=True)
    assert sorted(plain) == list(range(NUM_ROWS)) and packed == plain and cached == plain
    assert packer.num_twins == 3
    own = by_prefix.prompt_tokens - by_prefix.cached_tokens
    assert 0 < own < by_input.prompt_tokens - by_input.cached_tokens
    assert by_prefix.computed_tokens < by_input.computed_tokens
