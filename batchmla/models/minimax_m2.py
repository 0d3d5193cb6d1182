"""MiniMax-M2 and M2.5: grouped-query attention with norms over all heads, sigmoid routing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from batchmla.attention import gqa
from batchmla.errors import JobError
from batchmla.kernels.ops import Ops, RouterDims
from batchmla.kv.layout import KVLayout
from batchmla.kv.step import Step
from batchmla.layers.moe import Moe
from batchmla.layers.rope import Rope, RopeSpec
from batchmla.models.base import Plans
from batchmla.models.decoder import Decoder, Layer
from batchmla.models.hf import (
    MAX_EXPERTS,
    MAX_HEAD_WIDTH,
    MAX_LAYERS,
    Fields,
    check_active,
    read_heads,
    read_rope,
    shown,
)
from batchmla.models.names import (
    gqa_rules,
    layer_rule,
    moe_rules,
    norm_rules,
    outer_rules,
    skip_mtp,
)
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import Rule, Skip

FULL_ATTENTION = 1  # in `attn_type_list`; 0 is the linear attention of MiniMax-Text-01
KV_FORMATS = gqa.FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model; every layer is routed."""

    num_layers: int
    vocab_size: int
    max_positions: int
    width: int
    expert_width: int
    num_experts: int
    router: RouterDims
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: RopeSpec
    is_tied: bool
    num_mtp_layers: int
    dtype: str
    quantization: str | None

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> "Config":
        """Reads `config.json`; what this family cannot compute is refused by name."""
        fields = Fields(raw)
        fields.require("hidden_act", "silu")
        fields.require("scoring_func", "sigmoid")
        fields.require("use_routing_bias", True)
        fields.require("use_qk_norm", True)
        fields.require("qk_norm_type", "per_layer")
        fields.require("shared_intermediate_size", 0)
        kinds = raw.get("attn_type_list")
        if kinds is not None and (
            not isinstance(kinds, list)
            or not kinds
            or any(kind != FULL_ATTENTION for kind in kinds)
        ):
            raise JobError(f"config.json: attn_type_list may hold 1 only, not {shown(kinds)}")
        if raw.get("sliding_window") is not None:
            raise JobError(
                f"config.json: sliding_window {shown(raw['sliding_window'])} is not supported"
            )
        num_heads, num_kv_heads = read_heads(fields)
        head_dim = fields.integer("head_dim", most=MAX_HEAD_WIDTH)
        num_experts = fields.integer("num_local_experts", most=MAX_EXPERTS)
        active = fields.integer("num_experts_per_tok")
        check_active(fields, active, num_experts)
        return Config(
            num_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            width=fields.integer("hidden_size"),
            expert_width=fields.integer("intermediate_size"),
            num_experts=num_experts,
            router=RouterDims(active=active, normalise=True, scale=1.0),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            eps=fields.number("rms_norm_eps", 1e-6),
            rope=_read_rope(fields, head_dim),
            is_tied=fields.flag("tie_word_embeddings", False),
            num_mtp_layers=fields.count("num_mtp_modules", 0),
            dtype=fields.dtype(),
            quantization=fields.quantization(),
        )

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """Every layer alike."""
        return (gqa.KIND,) * self.num_layers

    @property
    def mha_row_width(self) -> int:
        """K and V of every query head."""
        return 2 * self.num_heads * self.head_dim


def _read_rope(fields: Fields, head_dim: int) -> RopeSpec:
    """The published files give the rotated width itself, transformers its share of a head."""
    nested = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    factor = fields.raw.get("partial_rotary_factor")
    if factor is None and isinstance(nested, Mapping):
        factor = nested.get("partial_rotary_factor")
    if factor is not None and (
        isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1
    ):
        raise JobError(
            f"config.json: partial_rotary_factor must be a number above 0 and at most 1, not "
            f"{shown(factor)}"
        )
    width = fields.integer("rotary_dim", int(head_dim * (1.0 if factor is None else factor)))
    if width < 2 or width % 2 or width > head_dim:
        raise JobError(
            f"config.json: rotary_dim {width} must be an even width within head_dim {head_dim}"
        )
    return read_rope(fields, width, share=width / head_dim, default_theta=5e6)[0]


def layout(config: Config, kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
    """k and v of this rank's kv heads in every layer."""
    parts = gqa.parts(config.num_kv_heads, config.head_dim, kv_dtype, placement)
    return KVLayout(layers=(parts,) * config.num_layers, page_tokens=page_tokens)


def build(config: Config, par: Par, ops: Ops) -> Decoder:
    """The model with empty weights."""
    rope = Rope(config.rope)

    def plan_step(step: Step, dtype: torch.dtype) -> Plans:
        return {gqa.KIND: gqa.plan(step, rope, config.head_dim, dtype, ops.reads_pages)}

    def build_layer(_: int) -> Layer:
        attention = gqa.GqaAttention(
            par,
            ops,
            width=config.width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            qk_norm=gqa.QkNorm.FULL,
        )
        ffn = Moe(
            par,
            ops,
            width=config.width,
            num_experts=config.num_experts,
            expert_width=config.expert_width,
            shared_width=0,
            router=config.router,
            has_router_bias=True,
        )
        return Layer(ops, config.width, config.eps, gqa.KIND, attention, ffn)

    return Decoder.assemble(config, par, ops, build_layer, plan_step)


def rules(config: Config) -> tuple[Rule | Skip, ...]:
    """Hugging Face's names; w1 is the gate, w3 the up and w2 the down projection."""
    width, layers = config.width, range(config.num_layers)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    found = [
        *outer_rules(config.vocab_size, width, config.is_tied),
        *norm_rules(layers, width),
        *gqa_rules(layers, width, heads, kv_heads, head_dim),
        layer_rule(layers, "self_attn.q_norm.weight", "attention.norms.weights.0",
                   (heads * head_dim,), 0),
        layer_rule(layers, "self_attn.k_norm.weight", "attention.norms.weights.1",
                   (kv_heads * head_dim,), 0, num_parts=kv_heads),
        layer_rule(layers, "block_sparse_moe.e_score_correction_bias", "ffn.router.bias",
                   (config.num_experts,)),
        *moe_rules(layers, width, config.expert_width, config.num_experts,
                   source="block_sparse_moe", names=("w1", "w3", "w2")),
    ]  # fmt: skip
    if config.num_mtp_layers:
        found.append(skip_mtp(config.num_layers))
    return tuple(found)
