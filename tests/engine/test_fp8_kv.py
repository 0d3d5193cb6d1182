"""The fp8 cache of plain and latent attention through the whole engine, on all kernels."""

from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import preempt_often
from fakes import ListSource, make_prompt
from tiny import read_config, write_tiny

from batchmla.core import EngineOptions, Prompt, SamplingParams
from batchmla.engine.engine import load_engine, plan_engine
from batchmla.engine.hardware import Hardware, parse_hardware
from batchmla.engine.sampler import Draw
from batchmla.engine.sequence import Sequence

# kernels-… serve v3_wide in bfloat16, torch's the others
CASES = [
    ("llama", "bfloat16"), ("minimax_m2", "float32"), ("v3", "bfloat16"), ("v3_wide", "bfloat16")
]  # fmt: skip
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"max_batched_tokens": 7, "max_num_seqs": 3, "block_size": 4},
    {"max_num_seqs": 1, "prefix_caching": False},
    {"max_batched_tokens": 96, "block_size": 16, "preempts": True, "prefix_caching": False},
    {"max_batched_tokens": 64, "preempts": True},
)
NEW_TOKENS = 5


def make_prompts() -> list[Prompt]:
    rng = np.random.default_rng(5)
    prefix = rng.integers(2, 256, 40).tolist()
    lengths = (1, 5, 17, 30, 70)
    texts = [rng.integers(2, 256, length).tolist() for length in lengths]
    texts += [prefix + ids for ids in texts]
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
        SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS),
    )
    return [make_prompt(index, ids, kinds[index % 2]) for index, ids in enumerate(texts)]


def run(options: EngineOptions, change: dict[str, Any]) -> tuple[dict[int, list[int]], Any]:
    """Ids by row, and logits by row and number of tokens."""
    change = dict(change)
    preempts = change.pop("preempts", False)
    engine = load_engine(replace(options, **change))
    seen: dict[tuple[int, int], torch.Tensor] = {}
    plain_draw = engine._runner._sampler.draw

    def draw(logits_NV: torch.Tensor, sequences: Items[Sequence]) -> list[Draw]:
        for row, sequence in enumerate(sequences):
            seen[sequence.prompt.index, sequence.num_tokens] = logits_NV[row].clone()
        return plain_draw(logits_NV, sequences)

    engine._runner._sampler.draw = draw  # type: ignore[method-assign]
    if preempts:
        preempt_often(engine)
    done = {each.index: each for each in engine.generate(ListSource(make_prompts()))}
    assert all(each.error is None for each in done.values())
    if preempts:
        assert engine.stats().preemptions > 1
    elif change.get("prefix_caching", True):
        assert sum(each.cached_tokens for each in done.values()) > 0
    engine.close()
    return {index: each.token_ids.tolist() for index, each in done.items()}, seen


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_exact_mode_gives_the_same_bits_in_every_schedule(
    name: str, dtype: str, tmp_path: Path
) -> None:
    write_tiny(tmp_path, name)
    options = EngineOptions(
        model=str(tmp_path), device="cpu", dtype=dtype, kv_cache_dtype="fp8", block_size=8,
        deterministic=True,
    )  # type: ignore[arg-type]  # fmt: skip
    ids, logits = run(options, {})
    assert all(len(each) == NEW_TOKENS for each in ids.values())
    for change in SCHEDULES:
        other_ids, other_logits = run(options, change)
        assert other_ids == ids, change
        assert other_logits.keys() == logits.keys()
        assert all(torch.equal(logits[at], other_logits[at]) for at in logits), change
    _, plain = run(replace(options, kv_cache_dtype="auto"), {})
    first = min(plain)
    assert not torch.equal(plain[first], logits[first]), "the cache does round"


@pytest.mark.parametrize(
    ("name", "row_bytes", "plain_bytes"),
    # of all layers: two kv heads of 16 or 32 values and a byte, twice; 32 + 4 + 2 * 8; 64 + 4 + 64
    [("llama", 2 * 4 * 17, 2 * 4 * 32), ("minimax_m2", 2 * 4 * 33, 2 * 4 * 64),
     ("v3", 3 * 52, 3 * 80), ("v3_wide", 3 * 132, 3 * 192)],
)  # fmt: skip
def test_capacity_counts_every_byte(
    name: str, row_bytes: int, plain_bytes: int, tmp_path: Path
) -> None:
    write_tiny(tmp_path, name)
    machine, raw = parse_hardware("1xH200"), read_config(tmp_path)
    options = EngineOptions(
        model=str(tmp_path), device="cpu", dtype="bfloat16", kv_cache_dtype="fp8"
    )
    drafted = plan_engine(raw, options, machine)
    plain = plan_engine(raw, replace(options, kv_cache_dtype="bfloat16"), machine)
    assert (drafted.kv_dtype, plain.kv_dtype) == ("fp8", "bfloat16")
    assert drafted.layout.token_bytes == drafted.layout.bytes_for(1) == row_bytes
    assert plain.layout.token_bytes == plain_bytes
    assert drafted.kv_pool_bytes == drafted.num_pages * drafted.layout.page_tokens * row_bytes
    assert drafted.kv_capacity_tokens > plain.kv_capacity_tokens
    # GPUs read records where they lie; on a processor rows are gathered and decoded, layer by layer
    assert drafted.memory.workspace_bytes == plain.memory.workspace_bytes
    size = 2**34
    here = plan_engine(
        raw, options, Hardware(name="CPU", kind="cpu", memory_bytes=size, free_bytes=size)
    )
    gathered = here.kv_pool_bytes / raw["num_hidden_layers"] * (1 + plain_bytes / row_bytes)
    assert here.memory.workspace_bytes > gathered
