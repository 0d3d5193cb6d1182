"""Exact mode: the same ids and logits, bit for bit, whatever shares the steps of a row."""

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import ListSource, make_prompt
from tiny import TINY, write_tiny

from batchmla.core import EngineOptions, Prompt, SamplingParams
from batchmla.engine.engine import EngineCore, load_engine
from batchmla.engine.sampler import Draw
from batchmla.engine.scheduler import Chunk
from batchmla.engine.sequence import Sequence

NUM_ROWS = 24
NEW_TOKENS = 12
PREFIX_TOKENS = 70
# how the schedule of a run differs from the first one's
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 1},
    {"max_batched_tokens": 1},
    {"max_batched_tokens": 7, "max_num_seqs": 5, "block_size": 4},
    {"max_batched_tokens": 64, "prefix_caching": False},
    {"max_batched_tokens": 512, "max_num_seqs": 3, "block_size": 64},
    {"max_batched_tokens": 33, "block_size": 8, "preempts": True},
    {"block_size": 8, "preempts": True, "prefix_caching": False, "reverses": True},
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
    lengths = rng.permutation([1, 2, 5, 15, 16, 17, 31, 40, 60, 63, 64, 65, 80, 100, 127, 129])
    texts = [rng.integers(2, 256, length).tolist() for length in lengths]
    texts += [prefix + rng.integers(2, 256, length).tolist() for length in range(1, 9)]
    assert len(texts) == NUM_ROWS
    return [make_prompt(i, ids, kinds[i % 3]) for i, ids in enumerate(texts)]


def run(folder: Path, dtype: str, prompts: Items[Prompt], change: dict[str, Any]) -> Found:
    """All prompts through a new engine in exact mode."""
    change = {"deterministic": True, "block_size": 16, **change}
    preempts, reverses = change.pop("preempts", False), change.pop("reverses", False)
    engine = load_engine(EngineOptions(model=str(folder), device="cpu", dtype=dtype, **change))
    logits = watch_logits(engine)
    if preempts:
        preempt_often(engine)
    source = ListSource(reversed(prompts) if reverses else prompts)
    ids = {each.index: each.token_ids.tolist() for each in engine.generate(source)}
    if preempts:
        assert engine.stats().preemptions > 5
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


def preempt_often(engine: EngineCore) -> None:
    """Every fifth step the youngest sequence loses its pages, needed or not."""
    scheduler, steps = engine._scheduler, itertools.count(1)
    plain_schedule = scheduler.schedule

    def schedule() -> list[Chunk]:
        if next(steps) % 5 == 0 and scheduler.num_running > 1:
            scheduler._preempt(scheduler.group.running[-1])
        return plain_schedule()

    scheduler.schedule = schedule  # type: ignore[method-assign]


def differing(first: Found, second: Found) -> list[int]:
    """Rows with other ids or other bits in any of their logits."""
    assert first.ids.keys() == second.ids.keys()
    rows = {row for row, ids in first.ids.items() if second.ids[row] != ids}
    for place, logits_V in first.logits.items():
        if place in second.logits and not torch.equal(second.logits[place], logits_V):
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
        assert differing(first, run(folder, dtype, prompts, change)) == [], change
