"""Field cases of capacity and scheduling: rows, pages and chunks in tight caches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import ListSource, greedy_ids, make_prompt
from tiny import write_tiny
from watched import WatchedEngine, run

from batchmla.core import EngineOptions, FinishReason, Prompt, SamplingParams
from batchmla.engine.engine import load_engine
from batchmla.engine.sampler import Draw
from batchmla.engine.sequence import Sequence

PROBE = [9, 4, 7, 4, 7, 4, 9, 4, 7, 4]
# of the prompts of a run: which come, which way round, and what the engine may do in one step
COMPANY = (
    {"rows": [0], "max_num_seqs": 1},
    {"rows": range(24), "max_num_seqs": 24, "max_batched_tokens": 64},
    {"rows": range(23, -1, -1), "max_num_seqs": 24, "max_batched_tokens": 7},
    {"rows": range(24), "max_num_seqs": 2, "max_batched_tokens": 7, "prefix_caching": False},
    {"rows": [5, 0, 9], "max_num_seqs": 2, "max_batched_tokens": 64, "block_size": 4},
)  # fmt: skip


def company() -> list[Prompt]:
    """The probe, and 23 others that begin like it and go on for up to 23 tokens."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    others = [PROBE[: n % 7 + 1] + [n] * n for n in range(1, 24)]
    return [make_prompt(n, ids, greedy) for n, ids in enumerate([PROBE, *others])]


def probe_in(folder: Path, change: dict[str, object], *, is_exact: bool) -> list[torch.Tensor]:
    """The logits of the probe's tokens, in the order of its completion."""
    settings = dict(change)
    prompts = company()
    chosen = [prompts[row] for row in settings.pop("rows")]  # type: ignore[attr-defined]
    options = EngineOptions(
        model=str(folder), device="cpu", dtype="float32", deterministic=is_exact, **settings
    )  # type: ignore[arg-type]
    engine = load_engine(options)
    seen: dict[int, torch.Tensor] = {}
    plain_draw = engine._runner._sampler.draw

    def draw(logits_NV: torch.Tensor, sequences: list[Sequence]) -> list[Draw]:
        for row, sequence in enumerate(sequences):
            if sequence.prompt.index == 0:
                seen[sequence.num_tokens] = logits_NV[row].clone()
        return plain_draw(logits_NV, sequences)

    engine._runner._sampler.draw = draw  # type: ignore[method-assign, assignment]
    done = list(engine.generate(ListSource(chosen)))
    engine.close()
    assert len(done) == len(chosen) and len(seen) == 8
    return [seen[position] for position in sorted(seen)]


@pytest.fixture(scope="module", params=["llama", "v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    write_tiny(made, request.param)
    return made


def test_fc_100_a_row_in_other_company_is_the_same_row(folder: Path) -> None:
    """Bitwise in exact mode; without it within 1e-4 in float32."""
    alone, *others = (probe_in(folder, change, is_exact=True) for change in COMPANY)
    for logits in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, logits, strict=True))
    alone, *others = (probe_in(folder, change, is_exact=False) for change in COMPANY)
    for logits in others:
        for a, b in zip(alone, logits, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-4)


def test_fc_105_a_context_larger_than_the_cache_refuses_only_rows_that_do_not_fit(
    tmp_path: Path,
) -> None:
    write_tiny(tmp_path, "v3", max_position_embeddings=163_840)
    engine = load_engine(
        EngineOptions(model=str(tmp_path), device="cpu", dtype="float32", kv_pool_tokens=2048,
                      max_num_seqs=8, max_batched_tokens=256)
    )  # fmt: skip
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    prompts = [make_prompt(n, rng.integers(2, 256, 50).tolist(), params) for n in range(40)]
    prompts[7] = make_prompt(7, rng.integers(2, 256, 3000).tolist(), params)
    found = run(engine, prompts)
    engine.close()
    error = found[7].error or ""
    assert "3000 tokens" in error and "max_model_len = 2048" in error  # what fits, beside what came
    others = [completion for index, completion in found.items() if index != 7]
    assert all(one.error is None and len(one.token_ids) == 4 for one in others)


TIGHT = {"page_tokens": 4, "max_num_seqs": 8, "max_batched_tokens": 64, "max_model_len": 240}
LONG = SamplingParams(temperature=0.0, max_tokens=200)
THREE_ROWS = 3 * 220 // 4  # pages


def recomputed_share(expected_tokens: int | None) -> tuple[float, int]:
    """Of eight rows that end at 220 tokens, in a cache for three: recomputed tokens as a share of
    all that had to be computed, and preemptions."""
    prompts = [
        make_prompt(n, [n, *range(19)], LONG, expected_tokens=expected_tokens) for n in range(8)
    ]
    engine = WatchedEngine(num_pages=THREE_ROWS, **TIGHT)
    found = run(engine, prompts)
    for prompt in prompts:
        assert found[prompt.index].token_ids.tolist() == greedy_ids(prompt.token_ids, 200)
    stats = engine.stats()
    needed = stats.prompt_tokens - stats.cached_tokens + 8 * 199
    return (stats.computed_tokens - needed) / needed, stats.preemptions


def test_fc_106_admission_reserves_for_growth_and_counts_what_is_recomputed() -> None:
    """Nothing is computed twice where lengths are foretold; less than half where the forecast is as
    wrong as it can be. Every row ends either way."""
    assert recomputed_share(200) == (0.0, 0)
    share, preemptions = recomputed_share(1)
    assert preemptions > 0 and 0 < share < 0.5


def test_fc_107_a_prompt_is_started_only_when_it_can_end() -> None:
    """Four prompts, each of 60 % of the cache, in chunks of 16 tokens."""
    engine = WatchedEngine(
        num_pages=100, page_tokens=4, max_num_seqs=8, max_batched_tokens=16, max_model_len=400
    )
    params = SamplingParams(temperature=0.0, max_tokens=20)
    prompts = [make_prompt(n, [n, *[5] * 239], params) for n in range(4)]
    found = run(engine, prompts)
    for prompt in prompts:
        assert found[prompt.index].token_ids.tolist() == greedy_ids(prompt.token_ids, 20)
    stats = engine.stats()
    assert stats.preemptions == 0
    assert stats.computed_tokens == stats.prompt_tokens - stats.cached_tokens + 4 * 19


def test_fc_113_without_a_limit_a_row_may_use_the_rest_of_its_context() -> None:
    engine = WatchedEngine(num_pages=60, **TIGHT)
    prompts = [make_prompt(n, [n] * (n + 1), SamplingParams(temperature=0.0)) for n in range(3)]
    found = run(engine, prompts)
    for prompt in prompts:
        completion = found[prompt.index]
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(prompt.token_ids) + len(completion.token_ids) == TIGHT["max_model_len"]
