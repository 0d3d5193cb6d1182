"""Exact mode: the same ids and logits, bit for bit, whatever shares the steps of a row."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import preempt_often
from fakes import ListSource, make_prompt
from tiny import TINY, oracle_logits, read_config, write_tiny

from batchmla.core import EngineOptions, Prompt, SamplingParams
from batchmla.engine.engine import EngineCore, load_engine
from batchmla.engine.hardware import detect, parse_hardware
from batchmla.engine.sampler import Draw
from batchmla.engine.sequence import Sequence
from batchmla.engine.settle import settle_exact
from batchmla.errors import JobError
from batchmla.jobs.prompt import stream_key

NUM_ROWS = 24
NEW_TOKENS = 6
PREFIX_TOKENS = 70
LONG_PREFIX_TOKENS = 272  # more than a split of exact mode
# how the schedule of a run differs from the first one's; "rows": only every so many-th row
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"max_batched_tokens": 7, "max_num_seqs": 5, "block_size": 4, "rows": 2},
    {"max_batched_tokens": 96, "block_size": 8, "preempts": True, "reverses": True},
    {"max_num_seqs": 1, "rows": 5},
    {"max_batched_tokens": 1, "rows": 7},
    {"max_batched_tokens": 64, "prefix_caching": False},
    {"max_batched_tokens": 512, "max_num_seqs": 3, "block_size": 64},
    {"block_size": 8, "preempts": True, "prefix_caching": False},
)


@dataclass
class Found:
    """What an engine made of the prompts: ids by row, logits by row and number of tokens."""

    ids: dict[int, list[int]]
    logits: dict[tuple[int, int], torch.Tensor]


def make_prompts() -> list[Prompt]:
    """Short and long ones, some with a common prefix; every third greedy, the others drawn."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(2, 256, PREFIX_TOKENS).tolist()
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
        SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, repetition_penalty=1.2),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, max_tokens=NEW_TOKENS, min_p=0.01),
    )
    lengths = rng.permutation([1, 2, 5, 9, 15, 16, 17, 24, 31, 40, 58, 61, 63, 64, 65, 129])
    texts = [rng.integers(2, 256, length).tolist() for length in lengths]
    texts += [prefix + rng.integers(2, 256, length).tolist() for length in range(1, 9)]
    long_prefix = rng.integers(2, 256, LONG_PREFIX_TOKENS).tolist()
    texts[:14:2] = [long_prefix + ids for ids in texts[:14:2]]
    texts[9] = [*long_prefix, *long_prefix, *texts[9]]
    assert len(texts) == NUM_ROWS
    return [make_prompt(i, ids, kinds[i % 3]) for i, ids in enumerate(texts)]


def run(folder: Path, dtype: str, prompts: Items[Prompt], change: dict[str, Any]) -> Found:
    """All prompts through a new engine in exact mode."""
    change = {"deterministic": True, "block_size": 16, **change}
    if read_config(folder)["architectures"] == [TINY["v4"][0]]:
        change["block_size"] = max(8, change["block_size"])  # an entry stands for 8 tokens
    preempts, reverses = change.pop("preempts", False), change.pop("reverses", False)
    prompts = prompts[:: change.pop("rows", 1)]
    engine = load_engine(EngineOptions(model=str(folder), device="cpu", dtype=dtype, **change))
    logits = watch_logits(engine)
    if preempts:
        preempt_often(engine)
    source = ListSource(reversed(prompts) if reverses else prompts)
    ids = {each.index: each.token_ids.tolist() for each in engine.generate(source)}
    if preempts:
        assert engine.stats().preemptions > 1
    engine.close()
    return Found(ids, logits)


def watch_logits(engine: EngineCore) -> dict[tuple[int, int], torch.Tensor]:
    seen: dict[tuple[int, int], torch.Tensor] = {}
    sampler = engine._runner._sampler
    plain_draw = sampler.draw

    def draw(logits_NV: torch.Tensor, sequences: Items[Sequence]) -> list[Draw]:
        for row, sequence in enumerate(sequences):
            seen[sequence.prompt.index, sequence.num_tokens] = logits_NV[row].clone()
        return plain_draw(logits_NV, sequences)

    sampler.draw = draw  # type: ignore[method-assign]
    return seen


def differing(first: Found, second: Found) -> list[int]:
    """Rows of `second` with other ids or other bits in any of their logits."""
    rows = {row for row, ids in second.ids.items() if first.ids[row] != ids}
    for place, logits_V in second.logits.items():
        if place in first.logits and not torch.equal(first.logits[place], logits_V):
            rows.add(place[0])
    return sorted(rows)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for name in TINY:
        folder = tmp_path_factory.mktemp(name)
        made[name] = (folder, write_tiny(folder, name))
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", TINY)
def test_every_schedule_gives_the_same_bits(
    folders: dict[str, tuple[Path, Any]], name: str, dtype: str
) -> None:
    folder, _ = folders[name]
    prompts = make_prompts()
    first = run(folder, dtype, prompts, {})
    assert len(first.ids) == NUM_ROWS and max(map(len, first.ids.values())) == NEW_TOKENS
    for change in SCHEDULES:
        other = run(folder, dtype, prompts, change)
        assert len(other.ids) >= 4 and differing(first, other) == [], change


def test_default_mode_differs_where_exact_mode_does_not(
    folders: dict[str, tuple[Path, Any]],
) -> None:
    folder, _ = folders["v3"]
    prompts = make_prompts()
    changes = ({}, {"max_batched_tokens": 64, "max_num_seqs": 5})
    runs = [run(folder, "float32", prompts, {"deterministic": False, **each}) for each in changes]
    assert differing(*runs), "the comparison sees nothing"


@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_exact_logits_equal_transformers(folders: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, oracle = folders[name]
    prompts = [each for each in make_prompts() if each.params.repetition_penalty == 1][:8]
    found = run(folder, "float32", prompts, {"max_batched_tokens": 50})
    for prompt in prompts:
        ids = prompt.token_ids.tolist() + found.ids[prompt.index]
        expected_TV = oracle_logits(oracle, ids)
        for position in range(len(prompt.token_ids), len(ids)):
            got_V = found.logits[prompt.index, position]
            torch.testing.assert_close(got_V, expected_TV[position - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"backend": "reference"}, "back end 'reference'"), ({"device": "cuda"}, "not built yet")],
    ids=str,
)
def test_exact_mode_is_refused_where_it_is_not_built(options: dict[str, Any], said: str) -> None:
    wished = EngineOptions(model="none", deterministic=True, **options)
    hardware = parse_hardware("1xH200") if "device" in options else detect("cpu")
    with pytest.raises(JobError, match=said):
        settle_exact(wished, hardware)
    assert settle_exact(EngineOptions(model="none", deterministic=True), detect("cpu"))


def test_seeds_and_samples_give_streams_of_their_own(
    folders: dict[str, tuple[Path, Any]],
) -> None:
    folder, _ = folders["qwen3"]
    params = SamplingParams(temperature=1.0, max_tokens=12)
    prompts = [
        make_prompt(
            4 * seed + sample, [5, 6, 7], params, stream_key=stream_key(seed, "row", sample)
        )
        for seed in range(4)
        for sample in range(4)
    ]
    found = run(folder, "float32", prompts, {})
    assert len({tuple(ids) for ids in found.ids.values()}) == 16
    assert differing(found, run(folder, "float32", prompts, {"max_num_seqs": 3})) == []
