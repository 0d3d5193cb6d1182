"""How many prompt tokens fill the time that a step waits for memory."""

import dataclasses

import pytest
from fakes import make_prompt
from tiny import raw_config
from watched import WatchedEngine, run

from batchmla.core import EngineOptions
from batchmla.engine.costs import StepCosts, StepWork
from batchmla.engine.device_pace import device_pace
from batchmla.engine.engine import plan_engine
from batchmla.engine.hardware import detect_cpu, parse_hardware
from batchmla.engine.pace import MOST, Pace
from batchmla.engine.roofline import Rates

COSTS = StepCosts(
    token_flops=10.0, sampled_flops=4.0, prompt_pair_flops=0.0, decode_pair_flops=0.02,
    fixed_bytes=500.0, expert_bytes=0.0, active_experts=1.0, kv_token_bytes=2.0,
)  # fmt: skip
RATES = Rates(flops_per_s=6.0, bytes_per_s=2.0)


def work_of(decodes: int, prompt_tokens: int, context_tokens: int) -> StepWork:
    return StepWork(
        tokens=decodes + prompt_tokens, sampled=decodes, prompt_pairs=prompt_tokens * 20,
        decode_pairs=context_tokens, kv_tokens=context_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("decodes", [1, 8, 30])
def test_a_step_with_the_free_tokens_computes_as_long_as_it_reads(decodes: int) -> None:
    pace = Pace(costs=COSTS, flops_per_byte=3.0, least_tokens=1, overlaps_attention=True)
    context = 20 * decodes
    tokens = pace.prompt_tokens(decodes, context)
    work = work_of(decodes, tokens, context)
    flops_s = COSTS.flops(work) / RATES.flops_per_s
    bytes_s = COSTS.bytes(work) / RATES.bytes_per_s
    assert tokens > 1 and flops_s <= bytes_s < flops_s + COSTS.token_flops / RATES.flops_per_s * 1.1


@pytest.mark.parametrize("decodes", [1, 8, 30])
def test_where_attention_runs_by_itself_prompts_take_no_time_and_one_more_does(
    decodes: int,
) -> None:
    pace = Pace(costs=COSTS, flops_per_byte=3.0, least_tokens=1)
    tokens = pace.prompt_tokens(decodes, 50 * decodes)
    alone, beside, more = (
        COSTS.serial_step_s(work_of(decodes, count, 50 * decodes), RATES)
        for count in (0, tokens, tokens + 1)
    )
    assert tokens > 1 and alone == beside < more


def test_groups_share_what_is_read_of_weights() -> None:
    costs = dataclasses.replace(COSTS, expert_bytes=4000.0, active_experts=0.25)
    one = Pace(costs=costs, flops_per_byte=3.0, least_tokens=1)
    four = dataclasses.replace(one, groups=4)
    all_rows = one.prompt_tokens(40, 0)
    assert all_rows - 4 < 4 * four.prompt_tokens(10, 0) <= all_rows + 4


def test_there_is_always_some_progress() -> None:
    pace = Pace(costs=COSTS, flops_per_byte=0.001, least_tokens=5)
    assert pace.prompt_tokens(900, 9000) == 5


def test_the_limit_rises_while_places_stay_empty_and_falls_back() -> None:
    pace = Pace(costs=COSTS, flops_per_byte=3.0, least_tokens=1)
    before = pace.prompt_tokens(4, 0)
    for _ in range(9_000):
        pace.note(was_short=True)
    assert pace.scale == MOST and pace.prompt_tokens(4, 0) >= 15 * before
    for _ in range(150):
        pace.note(was_short=False)
    assert pace.scale == 1.0 and pace.prompt_tokens(4, 0) == before


class Noting(Pace):
    """Remembers what it was told, and stays at the limit that it began with."""

    def note(self, *, was_short: bool) -> None:
        self.notes = [*getattr(self, "notes", []), was_short]


def paced(max_num_seqs: int) -> tuple[WatchedEngine, Noting]:
    engine = WatchedEngine(
        num_pages=999, max_model_len=90, max_num_seqs=max_num_seqs, max_batched_tokens=64
    )
    costs = dataclasses.replace(COSTS, kv_token_bytes=0.0, decode_pair_flops=0.0)
    engine._scheduler.pace = pace = Noting(costs=costs, flops_per_byte=0.2, least_tokens=3)
    return engine, pace


def test_chunks_keep_to_the_pace_and_all_rows_end() -> None:
    engine, _ = paced(8)
    found = run(engine, [make_prompt(index, [index + 1] * 40) for index in range(6)])
    assert len(found) == 6 and engine.max_step_tokens <= 8 + 10


def test_the_scheduler_tells_when_prompts_wait_for_tokens_and_not_for_places() -> None:
    prompts = [make_prompt(index, [index + 1] * 30) for index in range(40)]
    engine, pace = paced(90)
    run(engine, prompts)
    held_back = pace.notes
    assert held_back[0] and not held_back[-1] and sum(held_back) > len(held_back) / 2
    engine, pace = paced(1)
    run(engine, prompts)
    assert not any(pace.notes)


def test_gpus_have_a_pace_by_their_data_sheet_and_processors_none() -> None:
    raw = raw_config("v3")
    options = EngineOptions(model="", load_format="dummy", max_model_len=512)
    gpu = parse_hardware("H200")
    config = plan_engine(raw, options, gpu)
    pace = device_pace(raw, config, gpu)
    assert pace is not None and pace.groups == 1 and not pace.overlaps_attention
    assert pace.flops_per_byte == pytest.approx(989 / 4.8)
    assert pace.prompt_tokens(0, 0) > config.layout.page_tokens
    unknown = dataclasses.replace(gpu, bf16_flops_per_s=None)
    assert device_pace(raw, config, unknown) is None
    cpu = detect_cpu()
    assert device_pace(raw, plan_engine(raw, options, cpu), cpu) is None
