"""MiniMax-M3's text model: attention to blocks of keys that an indexer chooses, norms around one,
SwiGLU-OAI. Images and videos are not read."""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from batchmla.attention import block_sparse, gqa
from batchmla.kernels.ops import Ops
from batchmla.kv.layout import KVLayout
from batchmla.kv.step import Step
from batchmla.layers.embed import Embedding, Head
from batchmla.layers.norm import RmsNorm
from batchmla.layers.oai_moe import OaiMoe, oai_mlp
from batchmla.layers.rope import Rope
from batchmla.models.base import Plans
from batchmla.models.decoder import Attention, Decoder, Layer
from batchmla.models.minimax_m3_config import Config
from batchmla.models.names import (
    gqa_rules,
    layer_rule,
    mlp_rules,
    moe_rules,
    norm_rules,
    outer_rules,
    skip_mtp,
)
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import Rule, Skip

__all__ = ["Config", "build", "layout", "rules"]

NORM_OFFSET = 1.0  # checkpoints hold what a norm's weights exceed it by
PREFIX = "language_model."
VISION = r"(vision_tower|multi_modal_projector|patch_merge_mlp)\..*"


def layout(config: Config, kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
    """k and v of this rank's kv heads, and an index key where blocks are chosen."""
    widths = config.attention
    whole = gqa.parts(widths.num_kv_heads, widths.head_dim, kv_dtype, placement)
    chosen = block_sparse.parts(widths, kv_dtype, placement)
    layers = tuple(chosen if chooses else whole for chooses in config.chooses)
    return KVLayout(layers=layers, page_tokens=page_tokens)


def build(config: Config, par: Par, ops: Ops) -> Decoder:
    """The model with empty weights."""
    rope, widths = Rope(config.rope), config.attention

    def plan_step(step: Step, dtype: torch.dtype) -> Plans:
        whole = gqa.plan(step, rope, widths.head_dim, dtype, ops.reads_pages)
        chosen = block_sparse.plan(
            step, whole, rope, widths.head_dim, config.blocks, dtype, ops.reads_pages
        )
        return {gqa.KIND: whole, block_sparse.KIND: chosen}

    def build_layer(index: int) -> Layer:
        kind = config.attention_kinds[index]
        attention = _build_attention(config, par, ops, chooses=config.chooses[index])
        ffn = (
            OaiMoe(par, ops, config.moe)
            if config.routes[index]
            else oai_mlp(
                par,
                ops,
                widths.model,
                config.ffn_width,
                config.moe.gate,
                group_unit=config.ffn_unit,
            )
        )
        return Layer(ops, widths.model, config.eps, kind, attention, ffn, NORM_OFFSET)

    embed = Embedding(par, config.vocab_size, widths.model, is_tied=config.is_tied)
    head = Head(par, ops, config.vocab_size, widths.model, embed if config.is_tied else None)
    layers = tuple(build_layer(index) for index in range(config.num_layers))
    norm = RmsNorm(ops, widths.model, config.eps, NORM_OFFSET)
    return Decoder(embed, layers, norm, head, plan_step)


def _build_attention(config: Config, par: Par, ops: Ops, *, chooses: bool) -> Attention:
    widths = config.attention
    if chooses:
        return block_sparse.BlockSparseAttention(
            par, ops, widths=widths, dims=config.blocks, eps=config.eps, norm_offset=NORM_OFFSET
        )
    return gqa.GqaAttention(
        par,
        ops,
        width=widths.model,
        num_heads=widths.num_heads,
        num_kv_heads=widths.num_kv_heads,
        head_dim=widths.head_dim,
        eps=config.eps,
        qk_norm=gqa.QkNorm.HEAD,
        norm_offset=NORM_OFFSET,
    )


def rules(config: Config) -> tuple[Rule | Skip, ...]:
    """The names of the published checkpoints; w1 is the gate, w3 the up and w2 the down
    projection of an expert."""
    found = [_behind_prefix(rule) for rule in _text_rules(config)]
    return (
        *found,
        Skip(pattern=VISION, reason="images and videos are not read"),
        Skip(pattern=r"(.*\.)?mtp\..*", reason="multi-token prediction is not used"),
    )


def _behind_prefix(rule: Rule | Skip) -> Rule | Skip:
    """The text model's part of the whole; norms may be zero, which is a weight of one."""
    if isinstance(rule, Skip):
        return replace(rule, pattern=re.escape(PREFIX) + rule.pattern)
    return replace(rule, source=PREFIX + rule.source, may_be_zero=True)


def _text_rules(config: Config) -> list[Rule | Skip]:
    widths, everywhere = config.attention, range(config.num_layers)
    chosen = [index for index in everywhere if config.chooses[index]]
    routed = [index for index in everywhere if config.routes[index]]
    dense = [index for index in everywhere if not config.routes[index]]
    norms = [
        layer_rule(everywhere, f"self_attn.{name}.weight", f"attention.{name}.weight",
                   (widths.head_dim,))
        for name in ("q_norm", "k_norm")
    ]  # fmt: skip
    return [
        *outer_rules(config.vocab_size, widths.model, config.is_tied),
        *norm_rules(everywhere, widths.model),
        *gqa_rules(
            everywhere, widths.model, widths.num_heads, widths.num_kv_heads, widths.head_dim
        ),
        *norms,
        *_index_rules(chosen, config),
        *mlp_rules(dense, widths.model, config.ffn_width, group_unit=config.ffn_unit),
        *_moe_rules(routed, config),
        skip_mtp(config.num_layers),
    ]


def _index_rules(layers: Sequence[int], config: Config) -> list[Rule]:
    """Projections are stacked behind those of q, k and v; heads go with their kv heads."""
    widths = config.attention
    all_heads = (widths.num_kv_heads * widths.index_dim, widths.model)
    one_head = (widths.index_dim, widths.model)
    return [
        layer_rule(layers, "self_attn.index_q_proj.weight", "attention.qkv.weight", all_heads, 0,
                   num_parts=widths.num_kv_heads),
        layer_rule(layers, "self_attn.index_k_proj.weight", "attention.qkv.weight", one_head),
        *(
            layer_rule(layers, f"self_attn.{name}.weight", f"attention.{name}.weight",
                       (widths.index_dim,))
            for name in ("index_q_norm", "index_k_norm")
        ),
    ]  # fmt: skip


def _moe_rules(layers: Sequence[int], config: Config) -> list[Rule]:
    moe, source = config.moe, "block_sparse_moe"
    return [
        layer_rule(layers, f"{source}.e_score_correction_bias", "ffn.router.bias",
                   (moe.num_experts,)),
        *moe_rules(layers, moe.width, moe.expert_width, moe.num_experts, source=source,
                   names=("w1", "w3", "w2")),
        *mlp_rules(layers, moe.width, moe.shared_width, f"{source}.shared_experts", "ffn.shared"),
    ]  # fmt: skip
