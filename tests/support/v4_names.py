"""Tensors of transformers' DeepSeek V4 under the names of the published checkpoints."""

import re

import torch

NAMES = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.norm\.", "norm."),
    (r"^model\.hc_head\.hc_(\w+)", r"hc_head_\1"),
    (r"^model\.layers\.", "layers."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(\w+)", r".hc_\1_\2"),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.scorer\.", ".attn.indexer."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.compressor\.position_bias", ".compressor.ape"),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.attn\.q_a_proj\.", ".attn.wq_a."),
    (r"\.attn\.q_b_proj\.", ".attn.wq_b."),
    (r"\.attn\.kv_proj\.", ".attn.wkv."),
    (r"\.attn\.o_a_proj\.", ".attn.wo_a."),
    (r"\.attn\.o_b_proj\.", ".attn.wo_b."),
    (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.attn\.sinks", ".attn.attn_sink"),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate\.e_score_correction_bias", ".gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
)


def published_v4(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor an expert and matrix, gates apart from ups."""
    found = {}
    for name, value in state.items():
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        if name.endswith("experts.gate_up_proj"):
            halves = zip(*value.chunk(2, dim=1), strict=True)
            for expert, (gate, up) in enumerate(halves):
                base = name.replace("gate_up_proj", str(expert))
                found[f"{base}.w1.weight"], found[f"{base}.w3.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                found[f"{name.replace('down_proj', str(expert))}.w2.weight"] = down
        else:
            found[name] = value
    return {name: value.clone().contiguous() for name, value in found.items()}
