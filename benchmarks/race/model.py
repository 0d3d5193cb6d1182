"""The models of the race: one DeepSeek-V3-shaped, 434 M parameters, random, written once; and
SmolLM2-135M-Instruct.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

FIELDS: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "first_k_dense_replace": 1,
    "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 12,
    "q_lora_rank": 384, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 64, "n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 384, "n_shared_experts": 1, "vocab_size": 49152,
    "tie_word_embeddings": False, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
SEED = 0
MODELS = ("race", "smollm2")
_ROOT = Path(__file__).resolve().parents[2]


def model_folder(name: str) -> Path:
    """The folder of one of `MODELS`, made if it is not there."""
    if name == "race":
        return write_model(_ROOT / "benchmarks" / "out" / "model")
    script = _ROOT / "examples" / "smollm2" / "make_model.py"
    spec = importlib.util.spec_from_file_location("make_model", script)
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    folder = script.parent / "out" / "model"
    maker.make(folder)
    return folder


def write_model(folder: Path) -> Path:
    """A bfloat16 checkpoint in `folder`, made by transformers unless it is there already."""
    marker = folder / "complete.json"
    wanted = json.dumps({"fields": FIELDS, "seed": SEED}, sort_keys=True)
    if marker.exists() and marker.read_text() == wanted:
        return folder
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(SEED)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**FIELDS)).to(torch.bfloat16)
    model.save_pretrained(folder)
    marker.write_text(wanted)
    return folder
