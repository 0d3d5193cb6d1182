"""DeepSeek V4's tensors under transformers' names: those of its modules, and those that it saves.

Both keep one tensor an expert and matrix; stacked experts are not read.
"""

import re
from collections.abc import Iterable

RAW = "embed.weight"  # a checkpoint that has it goes by the published names
# applied one after the other to what follows the layer's index, or to a whole name outside layers
LAYER = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^input_layernorm\.", "attn_norm."),
        (r"^post_attention_layernorm\.", "ffn_norm."),
        (r"^(attn|ffn)_hc\.(\w+)$", r"hc_\1_\2"),
        (r"^self_attn\.", "attn."),
        (r"^mlp\.", "ffn."),
        (r"^attn\.compressor\.indexer\.q_b_proj\.", "attn.indexer.wq_b."),
        (r"^attn\.compressor\.indexer\.scorer\.", "attn.indexer."),
        (r"^attn\.compressor\.indexer\.", "attn.indexer.compressor."),
        (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.compressor\.position_bias$", ".compressor.ape"),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"^attn\.q_a_proj\.", "attn.wq_a."),
        (r"^attn\.q_b_proj\.", "attn.wq_b."),
        (r"^attn\.kv_proj\.", "attn.wkv."),
        (r"^attn\.o_a_proj\.", "attn.wo_a."),
        (r"^attn\.o_b_proj\.", "attn.wo_b."),
        (r"^attn\.q_a_norm\.", "attn.q_norm."),
        (r"^attn\.norm\.", "attn.kv_norm."),
        (r"^attn\.sinks$", "attn.attn_sink"),
        (r"^ffn\.gate\.e_score_correction_bias$", "ffn.gate.bias"),
        (r"^(ffn\.(?:shared_experts|experts\.\d+))\.gate_proj\.", r"\1.w1."),
        (r"^(ffn\.(?:shared_experts|experts\.\d+))\.down_proj\.", r"\1.w2."),
        (r"^(ffn\.(?:shared_experts|experts\.\d+))\.up_proj\.", r"\1.w3."),
    )
)
OUTER = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
    )
)
IN_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.*)")


def published(names: Iterable[str]) -> dict[str, str]:
    """The published name of every tensor; of unknown ones their own."""
    every, known = list(names), dict[str, str]()  # layers repeat what follows their index
    if RAW in every:
        return {name: name for name in every}
    found = {}
    for name in every:
        match = IN_LAYER.fullmatch(name)
        if match is None:
            found[name] = _renamed(name, OUTER)
            continue
        rest = match[2]
        if rest not in known:
            known[rest] = _renamed(rest, LAYER)
        found[name] = f"layers.{match[1]}.{known[rest]}"
    return found


def _renamed(name: str, steps: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, new in steps:
        name = pattern.sub(new, name)
    return name
