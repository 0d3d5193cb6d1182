"""A cache of records through the whole engine, and its refusal where there is none."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import ListSource, make_prompt
from tiny import write_tiny

from batchmla.core import EngineOptions, SamplingParams
from batchmla.engine.engine import load_engine
from batchmla.errors import JobError
from batchmla.models import llama


@pytest.mark.parametrize("name", ["v32", "v4"])
def test_records_take_less_and_give_every_batch_the_same(name: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, name)
    rng = np.random.default_rng(5)
    prefix = rng.integers(2, 256, 24).tolist()
    texts = [[*prefix, *rng.integers(2, 256, length).tolist()] for length in (1, 5, 9, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    prompts = [make_prompt(index, ids, params) for index, ids in enumerate(texts)]
    options = EngineOptions(
        model=str(tmp_path), device="cpu", dtype="bfloat16", kv_cache_dtype="fp8", block_size=8,
        deterministic=True,
    )  # fmt: skip
    plain = load_engine(replace(options, kv_cache_dtype="auto"))
    runs = []
    for change in ({}, {"max_batched_tokens": 7, "max_num_seqs": 2}, {"prefix_caching": False}):
        engine = load_engine(replace(options, **change))  # type: ignore[arg-type]
        cache, whole = engine._runner._forward._layout, plain._runner._forward._layout
        assert cache.token_bytes < 0.8 * whole.token_bytes
        done = engine.generate(ListSource(prompts))
        runs.append({each.index: each.token_ids.tolist() for each in done})
        engine.close()
    assert runs[0] == runs[1] == runs[2]
    assert all(len(ids) == 6 for ids in runs[0].values())


def test_families_without_records_refuse_them_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path, "llama")
    monkeypatch.delattr(llama, "KV_FORMATS")
    options = EngineOptions(model=str(tmp_path), device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(JobError, match=r"model\.kv_cache_dtype fp8 is not built yet for .*; leave"):
        load_engine(options)
