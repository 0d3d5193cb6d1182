"""One run of rows through an engine: how long it took, and how long each row took."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchmla.bench.memory import watched_memory
from batchmla.bench.rows import SteadySource
from batchmla.core import Engine, Prompt
from batchmla.errors import DeviceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and 95th percentile over rows, in seconds."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run took. Of a row: `latency_s` from when the engine took it to its last token,
    `first_token_s` to its first one, `between_tokens_s` the mean time from one to the next (None
    for rows of one token).
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    latency_s: Spread
    first_token_s: Spread
    between_tokens_s: Spread | None
    preemptions: int
    peak_bytes: int


def measure(engine: Engine, prompts: Sequence[Prompt], concurrency: int, device: str) -> Run:
    """All rows once, `concurrency` of them at a time.

    Raises a `DeviceError` if one fails: a throughput of failed rows says nothing.
    """
    source = SteadySource(prompts, concurrency)
    latencies, firsts, betweens = [], [], []
    num_tokens = 0
    before = engine.stats()
    with watched_memory(device) as peak:
        start_s = time.perf_counter()
        for completion in engine.generate(source):
            latency_s = source.ended(completion)
            if completion.error is not None:
                raise DeviceError(f"row {completion.row_id} failed: {completion.error}")
            first_at_s, count = completion.first_token_at_s, len(completion.token_ids)
            assert first_at_s is not None, "a row without a first token"
            first_s = first_at_s - source.taken_at_s[completion.index]
            latencies.append(latency_s)
            firsts.append(first_s)
            if count > 1:
                betweens.append((latency_s - first_s) / (count - 1))
            num_tokens += count
        seconds = time.perf_counter() - start_s
    assert len(latencies) == len(prompts), f"{len(latencies)} of {len(prompts)} rows"
    return Run(
        seconds=seconds,
        prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        output_tokens=num_tokens,
        latency_s=_spread(latencies),
        first_token_s=_spread(firsts),
        between_tokens_s=_spread(betweens) if betweens else None,
        preemptions=engine.stats().preemptions - before.preemptions,
        peak_bytes=peak.num_bytes,
    )


def _spread(values: Sequence[float]) -> Spread:
    p50, p95 = np.percentile(values, (50, 95))
    return Spread(p50=float(p50), p95=float(p95))
