"""The whole engine on tiny checkpoints: ids and logits of transformers, whatever happens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import preempt_often
from fakes import ListSource, make_prompt
from logits import watch_logits
from tiny import CORE, TINY, WITH_LANES, oracle_logits, read_config, write_tiny

from batchmla.core import Completion, EngineOptions, FinishReason, Prompt, SamplingParams
from batchmla.engine.engine import load_engine
from batchmla.errors import DeviceError

NEW_TOKENS = 16
CHANGES: list[dict[str, Any]] = [
    {"block_size": 16},
    {"block_size": 4, "max_batched_tokens": 7},
    {"block_size": 8, "max_batched_tokens": 64, "max_num_seqs": 2},
    {"block_size": 8, "kv_pool_tokens": 160, "max_model_len": 92, "prefix_caching": False},
    {"block_size": 4, "kv_pool_tokens": 160, "max_model_len": 92},
    {"block_size": 16, "backend": "reference", "max_batched_tokens": 33},
]
BOTH_FLAVOURS = ("llama", "v3")
# families that share a flavour with these run what is hardest: small chunks, and preemption
PAIRS = [
    pytest.param(name, change, id=f"{name}-{change}")
    for name in (*BOTH_FLAVOURS, *(name for name in TINY if name not in CORE))
    for change in (CHANGES if name in BOTH_FLAVOURS else (CHANGES[1], CHANGES[4]))
]
PREFIX = [int(token) for token in np.random.default_rng(7).integers(2, 256, 40)]


@dataclass
class Case:
    """A checkpoint, its prompts and what transformers generates from them."""

    folder: Path
    prompts: list[Prompt]
    generated: list[list[int]]
    logits: list[torch.Tensor]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each family's case, made once."""
    return cache(lambda name: make_case(tmp_path_factory.mktemp(name), name))


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


def make_case(folder: Path, name: str) -> Case:
    oracle = write_tiny(folder, name)
    rng = np.random.default_rng(1)
    texts = [rng.integers(2, 256, length).tolist() for length in (1, 5, 16, 17, 33, 70)]
    texts += [PREFIX + rng.integers(2, 256, length).tolist() for length in (1, 3, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, stop_ids=frozenset({1}))
    prompts = [make_prompt(i, ids, params, expected_tokens=1) for i, ids in enumerate(texts)]
    generated, logits = [], []
    for ids in texts:
        output = oracle.generate(
            torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=1,
            pad_token_id=0,
        )  # fmt: skip
        generated.append([token for token in output[0, len(ids) :].tolist() if token != 1])
        logits.append(oracle_logits(oracle, ids + generated[-1]))
    return Case(folder, prompts, generated, logits)


def check(case: Case, found: dict[int, Completion], logits: dict[tuple[int, int], Any]) -> None:
    for prompt, want in zip(case.prompts, case.generated, strict=True):
        completion = found[prompt.index]
        assert completion.token_ids.tolist() == want, prompt.index
        reason = FinishReason.STOP if len(want) < NEW_TOKENS else FinishReason.LENGTH
        assert completion.finish_reason is reason
        expected_TV = case.logits[prompt.index]
        for position in range(len(prompt.token_ids), len(prompt.token_ids) + len(want)):
            got_V = logits[prompt.index, position]
            torch.testing.assert_close(got_V, expected_TV[position - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("case", "change"), PAIRS, indirect=["case"])
def test_greedy_ids_and_logits_equal_transformers(case: Case, change: dict[str, Any]) -> None:
    options = EngineOptions(model=str(case.folder), device="cpu", dtype="float32", **change)
    has_lanes = read_config(case.folder)["architectures"][0] in [TINY[it][0] for it in WITH_LANES]
    if has_lanes:  # an entry stands for up to 8 tokens
        options = replace(options, block_size=max(8, options.block_size or 0))
    engine = load_engine(options)
    logits = watch_logits(engine)
    if "kv_pool_tokens" in change:
        preempt_often(engine)
    found = {each.index: each for each in engine.generate(ListSource(case.prompts))}
    check(case, found, logits)
    stats = engine.stats()
    if "kv_pool_tokens" in change:
        assert stats.preemptions > 9
    elif has_lanes:  # kept where the second prompt was seen to leave the first
        assert [found[i].cached_tokens for i in (6, 8)] == [0, 40]
    elif change.get("max_num_seqs") != 2:
        assert [found[i].cached_tokens for i in (6, 7, 8)] == [0, 40, 40] or (
            change["block_size"] == 16 and [found[i].cached_tokens for i in (7, 8)] == [32, 32]
        )
    logits.clear()
    again = {each.index: each for each in engine.generate(ListSource(case.prompts))}
    check(case, again, logits)  # a prefix hit wherever there is one
    if options.prefix_caching:
        assert engine.stats().cached_tokens > stats.cached_tokens
    engine.close()


@pytest.mark.parametrize("case", BOTH_FLAVOURS, indirect=True)
def test_dummy_weights_need_no_checkpoint_and_repeat(case: Case) -> None:
    (case.folder / "config").mkdir(exist_ok=True)
    (case.folder / "config/config.json").write_bytes((case.folder / "config.json").read_bytes())
    options = EngineOptions(
        model=str(case.folder / "config"), device="cpu", dtype="float32", load_format="dummy"
    )
    prompts = case.prompts[:3]
    runs = [
        {c.index: c.token_ids.tolist() for c in load_engine(options).generate(ListSource(prompts))}
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and len(runs[0]) == 3


@pytest.mark.parametrize("case", BOTH_FLAVOURS, indirect=True)
def test_a_context_that_cannot_fit_is_refused_before_loading(case: Case) -> None:
    options = EngineOptions(model=str(case.folder), device="cpu", kv_pool_tokens=64)
    with pytest.raises(DeviceError, match="max_model_len to 64 or less"):
        load_engine(EngineOptions(model=str(case.folder), device="cpu", kv_pool_tokens=64,
                                  max_model_len=100))  # fmt: skip
    engine = load_engine(options)
    assert engine.stats().total_pages == 4
