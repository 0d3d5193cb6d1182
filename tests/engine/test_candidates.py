"""Placements of R1 and of dense models on machines that are planned for; what `auto` takes."""

from dataclasses import replace

import pytest
from published import DEEPSEEK_R1
from tiny import raw_config

from batchmla import kernels
from batchmla.core import EngineOptions
from batchmla.engine.candidates import (
    Candidate,
    asks_to_choose,
    best_of,
    candidates,
    placements,
    settle_parallel,
)
from batchmla.engine.config import resolve
from batchmla.engine.costs import step_costs
from batchmla.engine.drafts import draft_placed, engine_costs, engine_facts
from batchmla.engine.exchange import Exchange, exchange_of
from batchmla.engine.hardware import Hardware, parse_hardware
from batchmla.errors import DeviceError
from batchmla.placement import Placement

OPTIONS = EngineOptions(model="x")
EIGHT = parse_hardware("8xH200")
GIB = 2**30
CPU = Hardware(name="Xeon", kind="cpu", memory_bytes=16 * GIB, free_bytes=16 * GIB, cores=4)


@pytest.fixture(scope="module")
def r1() -> tuple[Candidate, ...]:
    return candidates(DEEPSEEK_R1, OPTIONS, EIGHT)


def of(found: tuple[Candidate, ...], tensor: int, expert: int, groups: int) -> Candidate:
    wanted = Placement(tensor=tensor, expert=expert, attention_data=groups)
    return next(each for each in found if each.placement == wanted)


def test_r1_on_eight_h200_is_recommended_attention_data_and_whole_experts(
    r1: tuple[Candidate, ...],
) -> None:
    best = best_of(r1)
    assert best is not None and best.config is not None and best.steady is not None
    assert best.placement == Placement(tensor=1, expert=8, attention_data=8)
    tensor = of(r1, 8, 1, 1)
    assert tensor.config is not None and tensor.steady is not None
    # all eight hold the same rows, or each its own beside a copy of what is outside the experts
    assert tensor.config.kv_capacity_tokens == pytest.approx(0.7e6, rel=0.08)
    assert best.config.kv_capacity_tokens == pytest.approx(3.4e6, rel=0.08)
    assert best.steady.tokens_per_s > 2.5 * tensor.steady.tokens_per_s
    assert not of(r1, 1, 1, 1).fits, "R1 on one H200"


def test_the_engine_sizes_its_pool_by_the_same_arithmetic(r1: tuple[Candidate, ...]) -> None:
    for tensor, expert, groups in ((8, 1, 1), (1, 8, 8), (2, 8, 4)):
        options = replace(
            OPTIONS, tensor_parallel=tensor, expert_parallel=expert, attention_data=groups
        )
        engine = resolve(*engine_facts(DEEPSEEK_R1, options, EIGHT))
        planned = of(r1, tensor, expert, groups).config
        assert planned == engine
        group_tokens = engine.num_pages * engine.layout.page_tokens
        assert engine.kv_capacity_tokens == groups * group_tokens
        memory = engine.memory
        used = engine.kv_pool_bytes + memory.weights_bytes + memory.workspace_bytes
        usable = 0.92 * EIGHT.memory_bytes
        assert usable - 2 * engine.layout.page_bytes < used + 1 <= usable + 2


def test_what_every_group_repeats_is_the_price_of_attention_data(
    r1: tuple[Candidate, ...],
) -> None:
    """With what is outside attention cut eight ways too, it would hold 4.0 M tokens."""
    config = of(r1, 1, 8, 8).config
    assert config is not None
    ops = kernels.load(config.backend)
    one = Placement(tensor=1, expert=8, attention_data=8)
    costs = step_costs(DEEPSEEK_R1, ops, config.layout, dtype="bfloat16", placement=one,
                       weight_scale=0.5)  # fmt: skip
    dense = 3 * 3 * 18432 * 7168 + 58 * 3 * 2048 * 7168  # of three layers, and the shared experts
    outer = 2 * 129_280 * 7168 * 2
    assert costs.fixed_bytes / 8 > 11.4e9 + dense + outer / 4, "all of it on each device"
    freed_bytes = 7 / 8 * (dense + outer)
    extra_tokens = 8 * freed_bytes / config.layout.token_bytes
    assert 0.6e6 < extra_tokens < 0.8e6
    assert config.kv_capacity_tokens + extra_tokens == pytest.approx(4.0e6, rel=0.08)


def test_every_use_of_the_devices_is_listed_once() -> None:
    found = list(placements(8, has_experts=True))
    assert len(found) == len(set(found)) and found[0] == Placement()
    assert all(each.num_ranks == 8 for each in found[1:])
    assert Placement(tensor=2, expert=4, attention_data=4) in found
    assert [each.tensor for each in placements(4, has_experts=False)] == [1, 4, 2, 1]
    assert list(placements(1, has_experts=True)) == [Placement()]


def test_a_dense_model_is_repeated_where_it_fits(r1: tuple[Candidate, ...]) -> None:
    raw = raw_config("llama", num_attention_heads=16, num_key_value_heads=8)
    found = candidates(raw, OPTIONS, EIGHT)
    best = best_of(found)
    assert best is not None and best.placement == Placement(attention_data=8)
    uncut = candidates(raw_config("llama"), OPTIONS, parse_hardware("3xH200"))
    refused = next(each for each in uncut if each.placement.tensor == 3)
    assert not refused.fits and refused.config is None and "3" in (refused.misfit or "")
    assert refused.to_json()["misfit"] == refused.misfit


def test_auto_means_one_rank_of_a_processor_and_the_best_of_gpus() -> None:
    auto = replace(OPTIONS, is_parallel_auto=True)
    one = settle_parallel(DEEPSEEK_R1, auto, CPU)
    assert (one.tensor_parallel, one.attention_data, one.is_parallel_auto) == (1, 1, False)
    local = replace(EIGHT, is_local=True)
    chosen = settle_parallel(DEEPSEEK_R1, auto, local)
    sizes = (chosen.tensor_parallel, chosen.expert_parallel, chosen.attention_data)
    assert sizes == (1, 8, 8)
    assert not asks_to_choose(OPTIONS, local), "without auto a job here has one rank"
    assert asks_to_choose(OPTIONS, EIGHT), "a machine that is planned for is used whole"
    assert not asks_to_choose(replace(OPTIONS, tensor_parallel=4), EIGHT)
    small = settle_parallel(DEEPSEEK_R1, OPTIONS, parse_hardware("2xL40S"))
    assert small.tensor_parallel == 2, "nothing fits: the fewest weights a device"


def test_more_ranks_than_devices_are_refused() -> None:
    options = replace(OPTIONS, attention_data=4, expert_parallel=4)
    with pytest.raises(DeviceError, match="asks for 4 ranks, but there are 2 GPUs here"):
        draft_placed(DEEPSEEK_R1, options, parse_hardware("2xH200"))


def test_exchanged_bytes_by_hand() -> None:
    found = Exchange(
        num_layers=3, num_expert_layers=2, row_bytes=100, vocab_size=50, active_experts=2
    )
    alone, tensor = Placement(), Placement(tensor=2)
    assert found.calls(alone) == 0 and found.sent_bytes(alone, 10, 4) == 0
    # seven sums of 10 rows, half of each moved twice; half of 4 rows of float32 logits gathered
    assert found.sent_bytes(tensor, 10, 4) == 7 * 10 * 100 + 4 * 50 * 4 / 2
    assert found.calls(tensor) == 8
    groups = Placement(expert=2, attention_data=2)  # a token reaches the other with 3/4
    assert found.sent_bytes(groups, 10, 4) == 2 * 10 * 0.75 * (200 + 16)
    cut = Placement(attention_data=2)
    assert found.sent_bytes(cut, 10, 4) == 2 * 10 * (200 + 16)
    assert found.seconds(groups, 10, 4, 1e3) == pytest.approx(3.24 + 6 * 10e-6)


def test_shapes_of_r1() -> None:
    found = exchange_of(DEEPSEEK_R1, kernels.load("reference"), itemsize=2)
    assert found == Exchange(
        num_layers=61, num_expert_layers=58, row_bytes=14_336, vocab_size=129_280, active_experts=8
    )


def test_costs_of_ranks_together() -> None:
    config = draft_placed(DEEPSEEK_R1, replace(OPTIONS, attention_data=8, expert_parallel=8), EIGHT)
    costs, tensor = (
        engine_costs(DEEPSEEK_R1, each)
        for each in (config, draft_placed(DEEPSEEK_R1, replace(OPTIONS, tensor_parallel=8), EIGHT))
    )
    assert costs.token_flops == tensor.token_flops
    assert costs.kv_token_bytes == 70_272 and tensor.kv_token_bytes == 8 * 70_272
    assert costs.fixed_bytes > 5 * tensor.fixed_bytes, "every group reads its own"
    assert costs.expert_bytes == pytest.approx(tensor.expert_bytes, rel=0.08)
