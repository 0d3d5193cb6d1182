"""Tiny random checkpoints in Hugging Face's format; transformers makes them and is the oracle."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from m3_names import published_m3, published_m3_config
from safetensors.torch import save_file
from v4_names import published_v4

COMMON = {
    "vocab_size": 256, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMA = COMMON | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "rope_parameters": LLAMA3, "tie_word_embeddings": False,
}  # fmt: skip
V3 = COMMON | {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "moe_intermediate_size": 64, "intermediate_size": 192, "norm_topk_prob": True,
    "rope_parameters": YARN,
}  # fmt: skip
K2 = V3 | {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "rope_parameters": YARN | {
        "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0,
    },
}  # fmt: skip
# widths that compiled kernels serve
V3_WIDE = V3 | {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip
V2_LITE = V3 | {
    "hidden_size": 64, "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "moe_intermediate_size": 32, "intermediate_size": 96, "norm_topk_prob": False,
    "topk_method": "greedy", "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V2 = V2_LITE | {
    "q_lora_rank": 48, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
    "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
}  # fmt: skip
V32 = V3 | {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 8}
V4 = COMMON | {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 32, "partial_rotary_factor": 0.25, "q_lora_rank": 32, "o_groups": 2,
    "o_lora_rank": 16, "sliding_window": 8, "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "index_n_heads": 16, "index_head_dim": 16, "index_topk": 2, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "hc_mult": 4, "swiglu_limit": 1.0,
    "routed_scaling_factor": 1.5, "rope_theta": 10000.0, "compress_rope_theta": 40000.0,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
QWEN2 = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
QWEN3 = QWEN2 | {
    "head_dim": 32, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
QWEN3_MOE = QWEN2 | {
    "head_dim": 32, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "mlp_only_layers": [0], "norm_topk_prob": True,
}  # fmt: skip
MINIMAX_M2 = QWEN2 | {
    "head_dim": 32, "rotary_dim": 16, "intermediate_size": 32, "num_local_experts": 8,
    "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
}  # fmt: skip
KIMI_LINEAR = COMMON | {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_token": 2, "num_shared_experts": 1, "num_expert_group": 1, "topk_group": 1,
    "moe_renormalize": True, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-3,
    "linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "mlp_layer_types": ["dense", *["sparse"] * 3], "pad_token_id": 2,
}  # fmt: skip
# a row reads 3 blocks of 4 keys; index heads are partly rotated
MINIMAX_M3 = COMMON | {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "rotary_dim": 16, "intermediate_size": 32, "dense_intermediate_size": 96,
    "shared_intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
    "swiglu_limit": 1.0, "index_n_heads": 2, "index_head_dim": 24, "index_block_size": 4,
    "index_topk_blocks": 3, "index_local_blocks": 1,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
TINY = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama_tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen2": ("Qwen2ForCausalLM", QWEN2),
    "qwen3": ("Qwen3ForCausalLM", QWEN3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", QWEN3_MOE),
    "minimax_m2": ("MiniMaxM2ForCausalLM", MINIMAX_M2),
    "minimax_m3": ("MiniMaxM3VLForCausalLM", MINIMAX_M3),
    "v2_lite": ("DeepseekV2ForCausalLM", V2_LITE),
    "v2": ("DeepseekV2ForCausalLM", V2),
    "v3": ("DeepseekV3ForCausalLM", V3),
    "v3_wide": ("DeepseekV3ForCausalLM", V3_WIDE),
    "v3_no_q_lora": ("DeepseekV3ForCausalLM", V3 | {"q_lora_rank": None, "v_head_dim": 24}),
    "k2": ("DeepseekV3ForCausalLM", K2),
    "v32": ("DeepseekV32ForCausalLM", V32),
    "v4": ("DeepseekV4ForCausalLM", V4),
    "kimi_linear": ("KimiLinearForCausalLM", KIMI_LINEAR),
    "v32_wide": (
        "DeepseekV32ForCausalLM",
        V32
        | {
            "index_topk": 40,
            "index_n_heads": 24,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
}
# the two flavours by their simplest families: what tests run in every combination
# families whose windows and states lie in lanes: prefixes are not found again there
WITH_LANES = ("v4", "kimi_linear")
# lengths at the edges of what a family reads
EDGES = {
    "minimax_m3": (1, 11, 12, 13, 17, 96),
    "v4": (1, 3, 4, 9, 17, 96),
    "kimi_linear": (1, 4, 5, 64, 65, 200),
    "v32": (1, 7, 8, 9, 17, 96),
    "v32_wide": (1, 39, 40, 41, 17, 96),
}
CORE = ("llama", "llama_tied", "v3", "v3_no_q_lora")


def raw_config(name: str, **changes: Any) -> dict[str, Any]:
    """What the family's `config.json` says."""
    architecture, fields = TINY[name]
    if architecture == "MiniMaxM3VLForCausalLM":
        return published_m3_config(fields | changes)
    return {"architectures": [architecture], **fields, **changes}


def make_oracle(name: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model in float32, eager attention, everything random."""
    architecture, fields = TINY[name]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**deepcopy(fields | changes))  # it edits rope_parameters
    config._attn_implementation = "eager"
    oracle = model_class(config).eval().float()
    randomise(oracle, seed)
    return oracle


def randomise(oracle: torch.nn.Module, seed: int) -> None:
    """Matrices N(0, 0.15), norms 1 + N(0, 0.1) in effect, biases N(0, 0.3)."""
    generator = torch.Generator().manual_seed(seed)
    held = 0 if oracle.config.model_type == "minimax_m3_vl_text" else 1
    state = dict(oracle.named_parameters()) | dict(oracle.named_buffers())
    with torch.no_grad():
        for name, value in sorted(state.items()):
            if "inv_freq" in name:
                continue
            noise = torch.randn(value.shape, generator=generator)
            if not value.is_floating_point():
                shuffled = torch.rand(len(value), oracle.config.n_routed_experts,
                                      generator=generator).argsort(dim=1)  # fmt: skip
                value.copy_(shuffled[:, : value.shape[1]])
            elif "A_log" in name:  # some heads forget at once, some nearly nothing
                value.copy_(noise * 2 - 1)
            elif "conv1d" in name:
                value.copy_(noise * 0.5)
            elif value.dim() > 1:
                value.copy_(noise * 0.15)
            elif "norm" in name and not name.endswith("bias"):
                value.copy_(held + noise * 0.1)
            else:
                value.copy_(noise * 0.3)


def write_tiny(folder: Path, name: str, seed: int = 0, **changes: Any) -> Any:
    """Saves the oracle's checkpoint and returns the oracle."""
    oracle = make_oracle(name, seed, **changes)
    oracle.save_pretrained(folder)
    if TINY[name][0] == "DeepseekV4ForCausalLM":
        save_file(published_v4(oracle.state_dict()), folder / "model.safetensors")
    if TINY[name][0] == "MiniMaxM3VLForCausalLM":
        save_file(published_m3(oracle.state_dict()), folder / "model.safetensors")
        raw = published_m3_config(json.loads((folder / "config.json").read_text()))
        (folder / "config.json").write_text(json.dumps(raw))
    return oracle


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


@torch.no_grad()
def oracle_logits(oracle: Any, ids: list[int]) -> torch.Tensor:
    """float32 [T, V] of one whole prompt."""
    logits: torch.Tensor = oracle(torch.tensor([ids])).logits[0]
    return logits
