"""Placements of R1 and of dense models on machines that are planned for; what `auto` takes."""

from dataclasses import replace

import pytest
import torch
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
from batchmla.engine.driver import driver_bytes
from batchmla.engine.exchange import Exchange, exchange_of
from batchmla.engine.hardware import Hardware, parse_hardware
from batchmla.engine.routed import Choice, RoutedRows
from batchmla.engine.workspace import Workspace
from batchmla.errors import DeviceError
from batchmla.kernels.groups import EXPANDED_BYTES
from batchmla.layers.across import PIECE_ROWS
from batchmla.models.load import count_model
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
    # all eight hold the same rows, or each its own beside a copy of attention and shared experts
    assert tensor.config.kv_capacity_tokens == pytest.approx(0.65e6, rel=0.02)
    assert best.config.kv_capacity_tokens == pytest.approx(4.0e6, rel=0.02)
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
        used += memory.driver_bytes
        assert memory.driver_bytes == driver_bytes(engine.placement) > 2e9
        usable = 0.92 * EIGHT.memory_bytes
        assert usable - 2 * engine.layout.page_bytes < used + 1 <= usable + 2


def test_what_every_group_repeats_is_the_price_of_attention_data(
    r1: tuple[Candidate, ...],
) -> None:
    """Attention and shared experts; of the rest a device has an eighth."""
    config = of(r1, 1, 8, 8).config
    assert config is not None
    ops, one = kernels.load(config.backend), Placement(tensor=1, expert=8, attention_data=8)
    whole = replace(one, has_whole_groups=True)
    cut_bytes, whole_bytes = (
        step_costs(DEEPSEEK_R1, ops, config.layout, dtype="bfloat16", placement=each,
                   weight_scale=0.5).fixed_bytes / 8
        for each in (one, whole)
    )  # fmt: skip
    dense = 3 * 3 * 18432 * 7168
    head = 129_280 * 7168  # counted as a code a value here; an embedding is not read whole
    assert whole_bytes - cut_bytes == 7 / 8 * (dense + head)
    shared = 58 * 3 * 2048 * 7168
    assert cut_bytes > 11.4e9 + shared, "all of it on each device"
    extra_tokens = 8 * 7 / 8 * shared / config.layout.token_bytes
    assert 0.24e6 < extra_tokens < 0.27e6, "what cutting shared experts would bring"
    freed = 7 / 8 * (dense + 2 * head * 2)
    counts = [
        count_model(DEEPSEEK_R1, each, ops, torch.bfloat16, keeps_quantised=True).weights_bytes
        for each in (one, whole)
    ]
    assert counts[1] - counts[0] == pytest.approx(freed, rel=1e-3)
    assert 8 * freed / config.layout.token_bytes == pytest.approx(0.488e6, rel=0.01)


def test_what_rows_of_all_groups_take_counts_where_it_is_more_than_attention(
    r1: tuple[Candidate, ...],
) -> None:
    workspace = Workspace(
        row_width=10, dtype_bytes=2, vocab_size=1, num_layers=1, max_num_seqs=1,
        max_batched_tokens=4, reads_pages=True, max_expanded_bytes=0, shared_elements=240,
    )  # fmt: skip
    more = replace(workspace, shared_elements=241)
    assert workspace.fixed_bytes(8) == 4 * 6 * 10 * 2 + 16
    assert more.fixed_bytes(8) - workspace.fixed_bytes(8) == 2
    spread, alone = of(r1, 1, 8, 8).config, of(r1, 1, 1, 1).config
    assert spread is not None and alone is not None
    # of R1 it is not: experts take the most of a group, attention of a device with all heads
    choice = Choice(num_experts=256, active=8, groups=8, kept=4)
    routed = RoutedRows(choice=choice, width=7168, features=2048, placement=spread.placement)
    attention, hidden = 8192 * 6 * 128 * (192 + 128) * 2 + EXPANDED_BYTES, 3 * 7168 * 2
    grown = spread.memory.workspace_bytes - alone.memory.workspace_bytes
    assert grown == routed.nbytes(2048, 2) - attention - 6144 * hidden


def test_all_devices_together_get_the_same_step(r1: tuple[Candidate, ...]) -> None:
    for each in r1[1:]:
        if each.config is not None:
            step_tokens = each.config.max_batched_tokens * each.placement.attention_data
            assert step_tokens == 16_384, each.placement
    assert r1[0].config is not None and r1[0].config.max_batched_tokens == 8192, "one device"


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
        num_layers=3, num_expert_layers=2, row_bytes=100, vocab_size=51,
        choice=Choice(num_experts=4, active=2),
        width=25, is_tied=False, num_dense_layers=1, dense_features=48, dense_unit=32,
    )  # fmt: skip
    alone, tensor = Placement(), Placement(tensor=2)
    assert found.calls(alone, 10) == 0 and found.sent_bytes(alone, 10, 4) == 0
    # seven sums of 10 rows, half of each moved twice; half of 4 rows of float32 logits gathered
    assert found.sent_bytes(tensor, 10, 4) == 7 * 10 * 100 + 4 * 51 * 4 / 2
    assert found.calls(tensor, 10) == 8
    groups = Placement(expert=2, attention_data=2)  # 5 of 6 pairs of experts reach the other
    assert found.sent_bytes(groups, 10, 4) == pytest.approx(2 * 10 * 5 / 6 * (200 + 16))
    cut = Placement(attention_data=2)
    assert found.sent_bytes(cut, 10, 4) == 2 * 10 * (200 + 16)
    assert found.seconds(groups, 10, 4, 1e3) == pytest.approx(3.6 + 6 * 10e-6)


def test_exchanged_bytes_of_what_groups_cut_among_them() -> None:
    found = Exchange(
        num_layers=3, num_expert_layers=0, row_bytes=96, vocab_size=64, choice=None,
        width=24, is_tied=False, num_dense_layers=2, dense_features=64, dense_unit=8,
    )  # fmt: skip
    groups = Placement(tensor=2, attention_data=4)
    ids, columns, rows = 3 * 10 * 8, 3 * 10 * 96 / 4, 3 * 10 * 2 * 96
    head = 3 * 5 * (96 + 4 * 64 / 8)
    assert found.common_bytes(groups, 10, 5) == ids + columns + 2 * rows + head
    summed = 7 * 10 * 96 + 5 * 64 * 4 / 2
    assert found.sent_bytes(groups, 10, 5) == summed + found.common_bytes(groups, 10, 5)
    assert found.calls(groups, 10) == 8 + 2 + 2 * 2 + 2
    assert found.calls(groups, PIECE_ROWS / 4 + 1) == 8 + 2 + 2 * 2 * 2 + 2
    odd = replace(found, dense_unit=16)  # 32 features of a rank are no four units
    assert found.common_bytes(groups, 10, 5) - odd.common_bytes(groups, 10, 5) == 2 * rows
    tied = replace(found, is_tied=True)
    assert tied.common_bytes(groups, 10, 5) == 2 * rows and tied.calls(groups, 10) == 8 + 2 * 2
    assert found.common_bytes(replace(groups, has_whole_groups=True), 10, 5) == 0


def test_shapes_of_r1() -> None:
    found = exchange_of(DEEPSEEK_R1, kernels.load("reference"), itemsize=2)
    assert found == Exchange(
        num_layers=61, num_expert_layers=58, row_bytes=14_336, vocab_size=129_280,
        choice=Choice(num_experts=256, active=8, groups=8, kept=4),
        width=7168, is_tied=False, num_dense_layers=3, dense_features=18_432, dense_unit=128,
    )  # fmt: skip


def test_costs_of_ranks_together() -> None:
    config = draft_placed(DEEPSEEK_R1, replace(OPTIONS, attention_data=8, expert_parallel=8), EIGHT)
    costs, tensor = (
        engine_costs(DEEPSEEK_R1, each)
        for each in (config, draft_placed(DEEPSEEK_R1, replace(OPTIONS, tensor_parallel=8), EIGHT))
    )
    assert costs.token_flops == tensor.token_flops
    assert costs.kv_token_bytes == 70_272 and tensor.kv_token_bytes == 8 * 70_272
    # every group reads its own attention and shared experts
    assert costs.fixed_bytes > 4 * tensor.fixed_bytes
    assert costs.expert_bytes == pytest.approx(tensor.expert_bytes, rel=0.08)
