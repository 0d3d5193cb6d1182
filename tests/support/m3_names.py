"""MiniMax-M3's text model under the names of the published checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch

ARCHITECTURE = "MiniMaxM3SparseForConditionalGeneration"
RENAMED = {
    "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
    "mlp.gate.weight": "block_sparse_moe.gate.weight",
    "mlp.shared_experts.": "block_sparse_moe.shared_experts.",
    "self_attn.indexer.q_": "self_attn.index_q_",
    "self_attn.indexer.k_": "self_attn.index_k_",
}
PUBLISHED_FIELDS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def published_m3(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of transformers' text model, each under its published name."""
    found = {}
    for name, value in state.items():
        for ours, published in RENAMED.items():
            name = name.replace(ours, published)
        if name.endswith(".mlp.experts.gate_up_proj"):
            stem = name.removesuffix("mlp.experts.gate_up_proj") + "block_sparse_moe.experts"
            for index, both in enumerate(value):
                gate, up = both.chunk(2)
                found |= {f"{stem}.{index}.w1.weight": gate, f"{stem}.{index}.w3.weight": up}
        elif name.endswith(".mlp.experts.down_proj"):
            stem = name.removesuffix("mlp.experts.down_proj") + "block_sparse_moe.experts"
            found |= {f"{stem}.{index}.w2.weight": down for index, down in enumerate(value)}
        elif name.endswith(".gate_up_proj.weight"):
            stem, (gate, up) = name.removesuffix("gate_up_proj.weight"), value.chunk(2)
            found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        else:
            found[name] = value
    return {f"language_model.{name}": value.contiguous() for name, value in found.items()}


def published_m3_config(text: Mapping[str, Any]) -> dict[str, Any]:
    """The whole model's config, with the text model's fields as published."""
    fields = {name: value for name, value in text.items() if name not in PUBLISHED_FIELDS}
    attention, mlp = fields.pop("layer_types", None), fields.pop("mlp_layer_types", None)
    sparse = {PUBLISHED_FIELDS[name]: text[name] for name in PUBLISHED_FIELDS if name in text}
    sparse |= {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
    if attention is not None:
        chooses = [int(kind != "full_attention") for kind in attention]
        sparse |= {"sparse_attention_freq": chooses, "sparse_disable_index_value": chooses}
    if mlp is not None:
        fields["moe_layer_freq"] = [int(kind == "sparse") for kind in mlp]
    said = {"hidden_act": "swigluoai", "use_gemma_norm": True, "scoring_func": "sigmoid"}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "minimax_m3_vl",
        "text_config": said | fields | {"sparse_attention_config": sparse},
    }
