"""A few seconds of the real engine, for its times: pieces of a text as prompts of several sizes.

Completions of different numbers of rows over short and long contexts, and prompts in chunks of
different sizes, so that every part of a step's time shows by itself.
"""

import time
from collections.abc import Sequence

import numpy as np

from batchmla.core import Prompt, SamplingParams, TokenIds
from batchmla.engine.calibration import StepTimes, fit
from batchmla.engine.config import EngineConfig
from batchmla.engine.costs import StepCosts
from batchmla.engine.engine import EngineCore

LIMIT_S = 15.0
ROUNDS = 3
NEW_TOKENS = 8
_SHORT = 16
_FEWEST_KEYS = 256


class _Once:
    """All prompts as soon as they are asked for."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = list(prompts)

    def take(self, limit: int, *, wait: bool) -> Sequence[Prompt]:
        """As a `PromptSource` does."""
        taken, self._prompts = self._prompts[:limit], self._prompts[limit:]
        return taken


def trial(
    engine: EngineCore,
    config: EngineConfig,
    costs: StepCosts,
    *,
    token_ids: TokenIds,
    prompt_tokens: int,
    limit_s: float = LIMIT_S,
) -> StepTimes | None:
    """Times fitted to steps of an engine that has nothing to do; about `limit_s`, one round at
    least. Prompts are pieces of `token_ids` from anywhere; `prompt_tokens`: a typical prompt of the
    job. None where too few steps were run."""
    sizes = trial_sizes(config, prompt_tokens)
    rng = np.random.default_rng(0)
    largest = max(sizes, key=lambda size: size[0] * size[1])
    _run(engine, largest, rng, token_ids)  # memory is touched, tables and scripts are made
    engine.meter.forget()
    step_s, started_s = engine.stats().step_s, time.perf_counter()
    for _ in range(ROUNDS):
        for size in sizes:
            _run(engine, size, rng, token_ids)
        if time.perf_counter() - started_s > limit_s * (1 - 1 / ROUNDS):
            break
    elapsed_s = time.perf_counter() - started_s
    found = fit(engine.meter.samples, costs)
    if found is None:
        return None
    loop_s = max(0.0, elapsed_s - (engine.stats().step_s - step_s))
    loop_share = loop_s / (engine.stats().step_s - step_s)
    parts = found.to_json() | {"loop_share": loop_share}
    return StepTimes(**parts)


Size = tuple[int, int, int]
"""Rows, tokens of each prompt, new tokens of each."""


def trial_sizes(config: EngineConfig, prompt_tokens: int) -> list[Size]:
    """Numbers of rows from one to as many as may run, with short prompts and with typical ones;
    then prompts alone, from a whole step down to a small part of one.
    """
    room = config.kv_capacity_tokens // config.placement.attention_data
    longest = config.max_model_len - NEW_TOKENS
    typical = max(1, min(prompt_tokens, longest))
    chunk = max(1, min(config.max_batched_tokens, longest))
    counts = [1]
    while counts[-1] * 4 <= config.max_num_seqs:
        counts.append(counts[-1] * 4)
    if counts[-1] < min(config.max_num_seqs, 128):
        counts.append(min(config.max_num_seqs, 128))
    found: list[Size] = []
    for count in counts:
        for length in sorted({min(_SHORT, longest), min(max(typical, _FEWEST_KEYS), longest)}):
            rows = min(count, max(1, room // (length + NEW_TOKENS)))
            found.append((rows, length, NEW_TOKENS))
    prompts = sorted({max(1, chunk // part) for part in (1, 4, 16)}, reverse=True)
    found += [(1, length, 1) for length in prompts]
    return list(dict.fromkeys(found))


def _run(engine: EngineCore, size: Size, rng: np.random.Generator, token_ids: TokenIds) -> None:
    count, length, new_tokens = size
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
    prompts = [
        Prompt(
            row_id=str(index),
            index=index,
            params=params,
            token_ids=_piece(token_ids, int(rng.integers(len(token_ids))), length),
            expected_tokens=new_tokens,
        )
        for index in range(count)
    ]
    for completion in engine.generate(_Once(prompts)):
        assert completion.error is None, completion.error


def _piece(token_ids: TokenIds, start: int, length: int) -> TokenIds:
    """Tokens from `start` on, and from the beginning again."""
    return token_ids.take(np.arange(start, start + length), mode="wrap")
