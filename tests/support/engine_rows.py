"""Rows of every kind for the fake model, and what became of them."""

import itertools

import numpy as np
from fakes import make_prompt

from batchmla.core import Completion, FinishReason, Prompt, SamplingParams
from batchmla.engine.engine import EngineCore
from batchmla.engine.group import Chunk


def mixed_prompts(seed: int, count: int = 14) -> list[Prompt]:
    """Greedy and sampled rows of every kind, half of them with a common prefix."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 97, 20).tolist()
    prompts = []
    for index in range(count):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.9])),
            min_p=float(rng.choice([0.0, 0.05])),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
            min_tokens=int(rng.integers(0, 4)),
            max_tokens=int(rng.integers(1, 30)),
            stop_ids=frozenset(rng.integers(0, 97, 2).tolist()),
        )
        own = rng.integers(0, 97, rng.integers(1, 25)).tolist()
        token_ids = (prefix if index % 2 else []) + own
        prompts.append(make_prompt(index, token_ids, params, expected_tokens=1))
    return prompts


def preempt_often(engine: EngineCore) -> None:
    """Every third step the youngest sequence loses its pages, needed or not."""
    scheduler, steps = engine._scheduler, itertools.count(1)
    plain_schedule = scheduler.schedule

    def schedule() -> list[Chunk]:
        if next(steps) % 3 == 0 and scheduler.num_running > 1:
            scheduler._preempt(scheduler.groups[0].running[-1])
        return plain_schedule()

    scheduler.schedule = schedule  # type: ignore[method-assign]


def ids(found: dict[int, Completion]) -> list[tuple[list[int], FinishReason]]:
    return [(found[i].token_ids.tolist(), found[i].finish_reason) for i in sorted(found)]


ROOMY = {"num_pages": 400, "max_model_len": 96, "max_num_seqs": 16, "max_batched_tokens": 512}
