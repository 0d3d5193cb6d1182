"""Machines for the packing simulator: a model's costs, a device's rates, the engine's limits."""

from dataclasses import dataclass
from typing import Any

from race.model import FIELDS

from batchmla import kernels
from batchmla.engine.costs import StepCosts, step_costs
from batchmla.engine.hardware import parse_hardware
from batchmla.engine.roofline import Rates
from batchmla.models import get_family
from batchmla.placement import Placement

_YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_SMALL = FIELDS | {"architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16"}
R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16",
    "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "moe_intermediate_size": 2048, "n_shared_experts": 1, "vocab_size": 129280,
    "max_position_embeddings": 163840, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 10000, "rms_norm_eps": 1e-6,
    "rope_scaling": _YARN, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
LITE: dict[str, Any] = R1 | {
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 27,
    "first_k_dense_replace": 1, "intermediate_size": 10944, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408,
    "n_shared_experts": 2, "vocab_size": 102400, "routed_scaling_factor": 1.0,
    "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy",
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a step costs and how large it may be; `reads_once`: a page that several sequences of a
    step hold is read once.
    """

    name: str
    costs: StepCosts
    rates: Rates
    page_tokens: int
    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    pool_tokens: int
    reads_once: bool


def small_cpu(pool_tokens: int, *, max_num_seqs: int = 64, max_model_len: int = 2048) -> Machine:
    """The 434 M model of the race on two cores, at the rates that the race measured."""
    return Machine(
        name="V3 434M, 2 cores",
        costs=_costs(_SMALL, 32),
        rates=Rates(flops_per_s=7.94e11, bytes_per_s=2.13e10),
        page_tokens=32,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=1024,
        max_model_len=max_model_len,
        pool_tokens=max(pool_tokens, max_model_len),
        reads_once=True,
    )


def lite_h200(pool_tokens: int | None = None) -> Machine:
    """V2-Lite in bfloat16 on one H200; by default a pool of all that the weights leave."""
    hardware = parse_hardware("H200")
    assert hardware.bf16_flops_per_s and hardware.bandwidth_bytes_per_s
    costs = _costs(LITE, 64)
    left_bytes = 0.92 * hardware.memory_bytes - 31.4e9 - 8e9
    return Machine(
        name="V2-Lite, one H200",
        costs=costs,
        rates=Rates(
            flops_per_s=hardware.bf16_flops_per_s, bytes_per_s=hardware.bandwidth_bytes_per_s
        ),
        page_tokens=64,
        max_num_seqs=512,
        max_batched_tokens=8192,
        max_model_len=8192,
        pool_tokens=pool_tokens or int(left_bytes / costs.kv_token_bytes),
        reads_once=False,
    )


def r1_8xh200(pool_tokens: int | None = None) -> Machine:
    """R1 with weights of one byte on eight H200, rows spread over them (attention-data), all
    devices seen as one; products at the bfloat16 rate.
    """
    hardware = parse_hardware("8xH200")
    assert hardware.bf16_flops_per_s and hardware.bandwidth_bytes_per_s
    costs = _costs(R1, 64, weight_scale=0.5)
    left_bytes = 8 * (0.92 * hardware.memory_bytes - 10e9) - 671e9
    return Machine(
        name="R1, 8 x H200",
        costs=costs,
        rates=Rates(
            flops_per_s=8 * hardware.bf16_flops_per_s,
            bytes_per_s=8 * hardware.bandwidth_bytes_per_s,
        ),
        page_tokens=64,
        max_num_seqs=1024,
        max_batched_tokens=8192,
        max_model_len=40_960,
        pool_tokens=pool_tokens or int(left_bytes / costs.kv_token_bytes),
        reads_once=False,
    )


def _costs(raw: dict[str, Any], page_tokens: int, weight_scale: float = 1.0) -> StepCosts:
    family = get_family(raw)
    layout = family.layout(family.Config.from_hf(raw), "bfloat16", Placement(), page_tokens)
    ops = kernels.load("reference")
    return step_costs(raw, ops, layout, dtype="bfloat16", weight_scale=weight_scale)
