"""Costs of a step: on numbers small enough to check by hand, and on a model's shapes."""

import pytest
import torch
from tiny import raw_config

from batchmla import kernels
from batchmla.engine.costs import StepCosts, StepWork, step_costs
from batchmla.engine.roofline import Rates
from batchmla.models import get_family
from batchmla.models.load import count_model
from batchmla.placement import Placement

COSTS = StepCosts(
    token_flops=10.0,
    sampled_flops=5.0,
    prompt_pair_flops=1.0,
    decode_pair_flops=2.0,
    fixed_bytes=100.0,
    expert_bytes=80.0,
    active_experts=0.25,
    kv_token_bytes=3.0,
)
WORK = StepWork(tokens=7, sampled=2, prompt_pairs=40, decode_pairs=20, kv_tokens=30)


def test_flops_and_bytes_add_up() -> None:
    assert COSTS.flops(WORK) == 7 * 10 + 2 * 5 + 40 + 2 * 20
    assert COSTS.weight_bytes(1) == 100 + 80 / 4
    assert COSTS.weight_bytes(2) == 100 + 80 * (1 - 0.75**2)
    assert COSTS.bytes(WORK) == COSTS.weight_bytes(7) + 90


def test_a_step_takes_the_slower_of_both_and_serial_attention_comes_on_top() -> None:
    fast_bytes = Rates(flops_per_s=10.0, bytes_per_s=1e9)
    assert COSTS.step_s(WORK, fast_bytes) == pytest.approx(16)
    assert COSTS.serial_step_s(WORK, fast_bytes) == pytest.approx(16)
    assert COSTS.separate_step_s(WORK, fast_bytes) == pytest.approx(16)
    even = Rates(flops_per_s=1.0, bytes_per_s=1.0)
    assert COSTS.step_s(WORK, even) == pytest.approx(COSTS.bytes(WORK))
    assert COSTS.serial_step_s(WORK, even) == pytest.approx(COSTS.weight_bytes(7) + 90)
    assert COSTS.separate_step_s(WORK, even) == pytest.approx(COSTS.bytes(WORK) + 160)


@pytest.mark.parametrize("name", ["llama", "v3"])
def test_costs_follow_the_shapes_of_a_model(name: str) -> None:
    raw, ops = raw_config(name), kernels.load("reference")
    family = get_family(raw)
    config = family.Config.from_hf(raw)
    layout = family.layout(config, "bfloat16", Placement(), 16)
    costs = step_costs(raw, ops, layout, dtype="bfloat16")
    count = count_model(raw, Placement(), ops, torch.bfloat16)
    outer = raw["vocab_size"] * raw["hidden_size"]
    assert costs.sampled_flops == 2 * outer
    assert costs.token_flops == pytest.approx(2 * (count.active - 2 * outer), abs=2)
    assert costs.fixed_bytes + costs.expert_bytes == 2 * (count.total - outer)
    assert costs.kv_token_bytes == layout.token_bytes
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    if name == "llama":
        assert costs.decode_pair_flops == costs.prompt_pair_flops and costs.expert_bytes == 0
    else:
        width = 2 * raw["kv_lora_rank"] + raw["qk_rope_head_dim"]
        assert costs.decode_pair_flops == 2 * heads * layers * width
        share = raw["num_experts_per_tok"] / raw["n_routed_experts"]
        assert costs.active_experts == pytest.approx(share)


def test_half_the_bytes_a_weight() -> None:
    raw, ops = raw_config("v3"), kernels.load("reference")
    family = get_family(raw)
    layout = family.layout(family.Config.from_hf(raw), "bfloat16", Placement(), 16)
    plain = step_costs(raw, ops, layout, dtype="bfloat16")
    half = step_costs(raw, ops, layout, dtype="bfloat16", weight_scale=0.5)
    assert half.weight_bytes(3) == pytest.approx(plain.weight_bytes(3) / 2)
    assert half.kv_token_bytes == plain.kv_token_bytes
