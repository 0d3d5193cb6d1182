"""How many prompt tokens fill the time that a step waits for memory."""

import dataclasses

import pytest
from fakes import make_prompt
from watched import WatchedEngine, run

from batchmla.engine.costs import StepCosts, StepWork
from batchmla.engine.pace import Pace
from batchmla.engine.roofline import Rates

COSTS = StepCosts(
    token_flops=10.0, sampled_flops=4.0, prompt_pair_flops=0.01, decode_pair_flops=0.02,
    fixed_bytes=500.0, expert_bytes=0.0, active_experts=1.0, kv_token_bytes=2.0,
)  # fmt: skip


@pytest.mark.parametrize("decodes", [1, 8, 30])
def test_a_step_with_the_free_tokens_computes_as_long_as_it_reads(decodes: int) -> None:
    rates = Rates(flops_per_s=6.0, bytes_per_s=2.0)
    pace = Pace(costs=COSTS, flops_per_byte=3.0, least_tokens=1)
    context = 20 * decodes
    tokens = pace.prompt_tokens(decodes, context, context)
    work = StepWork(
        tokens=decodes + tokens, sampled=decodes, prompt_pairs=tokens * 20, decode_pairs=context,
        kv_tokens=context,
    )  # fmt: skip
    flops_s = COSTS.flops(work) / rates.flops_per_s
    bytes_s = COSTS.bytes(work) / rates.bytes_per_s
    assert tokens > 1 and flops_s <= bytes_s < flops_s + COSTS.token_flops / rates.flops_per_s * 1.1


def test_there_is_always_some_progress() -> None:
    pace = Pace(costs=COSTS, flops_per_byte=0.001, least_tokens=5)
    assert pace.prompt_tokens(900, 9000, 9000) == 5


def test_chunks_keep_to_the_pace_and_all_rows_end() -> None:
    engine = WatchedEngine(num_pages=99, max_model_len=90, max_num_seqs=8, max_batched_tokens=64)
    costs = dataclasses.replace(COSTS, kv_token_bytes=0.0, decode_pair_flops=0.0)
    engine._scheduler.pace = Pace(costs=costs, flops_per_byte=0.2, least_tokens=3)
    found = run(engine, [make_prompt(index, [index + 1] * 40) for index in range(6)])
    assert len(found) == 6 and engine.max_step_tokens <= 8 + 10
