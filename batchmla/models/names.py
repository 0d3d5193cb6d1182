"""Hugging Face's tensor names that families share, as rules; knows no family's config.

Shapes are those of whole tensors, before ranks cut them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from batchmla.kernels.ops import MlaDims
from batchmla.weights.rules import Rule, Skip


def outer_rules(vocab_size: int, width: int, is_tied: bool) -> list[Rule | Skip]:
    """Embedding, final norm and head."""
    found: list[Rule | Skip] = [
        Rule(source="model.embed_tokens.weight", target="embed.weight",
             shape=(vocab_size, width), shard_axis=0, group_axis=None if is_tied else 1),
        Rule(source="model.norm.weight", target="norm.weight", shape=(width,)),
        Skip(pattern=r".*\.rotary_emb\.inv_freq", reason="rotary frequencies are computed"),
    ]  # fmt: skip
    if is_tied:
        found.append(Skip(pattern=r"lm_head\.weight", reason="the head is tied to the embedding"))
    else:
        found.append(
            Rule(source="lm_head.weight", target="head.weight",
                 shape=(vocab_size, width), shard_axis=0, group_axis=0)
        )  # fmt: skip
    return found


def behind_prefix(prefix: str, rules: Iterable[Rule | Skip]) -> Iterator[Rule | Skip]:
    """The same tensors where a whole model's part is named with a prefix."""
    for rule in rules:
        if isinstance(rule, Skip):
            yield replace(rule, pattern=re.escape(prefix) + rule.pattern)
        else:
            yield replace(rule, source=prefix + rule.source)


def skip_mtp(num_layers: int) -> Skip:
    """Layers behind the last one are draft heads."""
    return Skip(
        pattern=r"model\.layers\.(\d+)\..*",
        from_layer=num_layers,
        reason="multi-token prediction is not used",
    )


def layer_rule(
    layers: Sequence[int],
    source: str,
    target: str,
    shape: tuple[int, ...],
    shard_axis: int | None = None,
    num_experts: int = 1,
    num_parts: int | None = None,
    group_unit: int | None = None,
) -> Rule:
    """A tensor of every one of `layers`; the names start behind the layer's index. With a
    `group_unit` attention groups cut it along `shard_axis` too."""
    return Rule(
        source=f"model.layers.{{layer}}.{source}",
        target=f"layers.{{layer}}.{target}",
        shape=shape,
        shard_axis=shard_axis,
        layers=layers,
        num_experts=num_experts,
        num_parts=num_parts,
        group_axis=None if group_unit is None else shard_axis,
        group_unit=group_unit or 1,
    )


def norm_rules(layers: Sequence[int], width: int) -> list[Rule]:
    """The two norms of a pre-norm layer."""
    return [
        layer_rule(layers, "input_layernorm.weight", "attention_norm.weight", (width,)),
        layer_rule(layers, "post_attention_layernorm.weight", "ffn_norm.weight", (width,)),
    ]


def gqa_rules(
    layers: Sequence[int],
    width: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_qkv_bias: bool = False,
) -> list[Rule]:
    """q, k and v stacked, and the output projection."""
    found = []
    for name, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
        source, target = f"self_attn.{name}_proj", "attention.qkv"
        shape, parts = (heads * head_dim, width), None if name == "q" else heads
        weight = (f"{source}.weight", f"{target}.weight", shape)
        found.append(layer_rule(layers, *weight, 0, num_parts=parts))
        if has_qkv_bias:
            bias = (f"{source}.bias", f"{target}.bias", shape[:1])
            found.append(layer_rule(layers, *bias, 0, num_parts=parts))
    columns = (width, num_heads * head_dim)
    out = layer_rule(layers, "self_attn.o_proj.weight", "attention.out.weight", columns, 1)
    return [*found, out]


def latent_rules(
    layers: Sequence[int], width: int, dims: MlaDims, query_rank: int | None
) -> list[Rule]:
    """Latent attention: the query's and the latent's down-projections stacked; `dims` of all
    heads. `query_rank` None: queries are projected from the input at once."""
    q_rows, kv_rows = (dims.heads * (dims.nope + each) for each in (dims.rope, dims.value))
    attn = "self_attn"
    if query_rank is None:
        found = [
            layer_rule(layers, f"{attn}.q_proj.weight", "attention.down.weight", (q_rows, width), 0)
        ]
    else:
        found = [
            layer_rule(layers, f"{attn}.q_a_proj.weight", "attention.down.weight",
                       (query_rank, width)),
            layer_rule(layers, f"{attn}.q_a_layernorm.weight", "attention.q_norm.weight",
                       (query_rank,)),
            layer_rule(layers, f"{attn}.q_b_proj.weight", "attention.q_up.weight",
                       (q_rows, query_rank), 0),
        ]  # fmt: skip
    return [
        *found,
        layer_rule(layers, f"{attn}.kv_a_proj_with_mqa.weight", "attention.down.weight",
                   (dims.latent + dims.rope, width)),
        layer_rule(layers, f"{attn}.kv_a_layernorm.weight", "attention.latent_norm.weight",
                   (dims.latent,)),
        layer_rule(layers, f"{attn}.kv_b_proj.weight", "attention.kv_b",
                   (kv_rows, dims.latent), 0),
        layer_rule(layers, f"{attn}.o_proj.weight", "attention.out.weight",
                   (width, dims.heads * dims.value), 1),
    ]  # fmt: skip


def mlp_rules(
    layers: Sequence[int],
    width: int,
    ffn_width: int,
    source: str = "mlp",
    target: str = "ffn",
    group_unit: int | None = None,
) -> list[Rule]:
    """A gated MLP: gate and up stacked, and down; cut over attention groups with a
    `group_unit`."""
    up, down = f"{target}.up.weight", f"{target}.down.weight"
    return [
        *(
            layer_rule(layers, f"{source}.{name}_proj.weight", up, (ffn_width, width), 0,
                       group_unit=group_unit)
            for name in ("gate", "up")
        ),
        layer_rule(layers, f"{source}.down_proj.weight", down, (width, ffn_width), 1,
                   group_unit=group_unit),
    ]  # fmt: skip


def moe_rules(
    layers: Sequence[int],
    width: int,
    expert_width: int,
    num_experts: int,
    source: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Rule]:
    """The router's matrix and the routed experts, one tensor each; `names`: gate, up, down."""
    gate, up, down = (f"{source}.experts.{{expert}}.{name}.weight" for name in names)
    rows, columns = (expert_width, width), (width, expert_width)
    return [
        layer_rule(layers, f"{source}.gate.weight", "ffn.router.weight", (num_experts, width)),
        layer_rule(layers, gate, "ffn.experts_up", rows, 0, num_experts),
        layer_rule(layers, up, "ffn.experts_up", rows, 0, num_experts),
        layer_rule(layers, down, "ffn.experts_down", columns, 1, num_experts),
    ]


def shared_moe_rules(
    layers: Sequence[int],
    width: int,
    expert_width: int,
    num_experts: int,
    shared_width: int,
    has_router_bias: bool,
) -> list[Rule]:
    """DeepSeek's experts: the routed ones, the router's bias for the choice, the shared one."""
    found = moe_rules(layers, width, expert_width, num_experts)
    if has_router_bias:
        found.append(
            layer_rule(layers, "mlp.gate.e_score_correction_bias", "ffn.router.bias",
                       (num_experts,))
        )  # fmt: skip
    if shared_width:
        found += mlp_rules(layers, width, shared_width, "mlp.shared_experts", "ffn.shared")
    return found
