"""Llama, Qwen2, Qwen3 and Qwen3-MoE: grouped-query attention, gated MLPs or softmax-routed experts.

SmolLM2, Llama 3 and the distills of R1 are of this family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from batchmla.attention import gqa
from batchmla.errors import JobError
from batchmla.kernels.ops import Ops, RouterDims, Scoring
from batchmla.kv.layout import KVLayout
from batchmla.kv.step import Step
from batchmla.layers.mlp import GatedMlp
from batchmla.layers.moe import Moe
from batchmla.layers.rope import Rope, RopeSpec
from batchmla.models.base import Plans
from batchmla.models.decoder import Decoder, Layer
from batchmla.models.hf import (
    MAX_EXPERTS,
    MAX_LAYERS,
    Fields,
    check_active,
    read_heads,
    read_rope,
    refuse_sliding_window,
    shown,
)
from batchmla.models.names import (
    gqa_rules,
    layer_rule,
    mlp_rules,
    moe_rules,
    norm_rules,
    outer_rules,
)
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import Rule, Skip

LLAMA, QWEN2 = "LlamaForCausalLM", "Qwen2ForCausalLM"
QWEN3, QWEN3_MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
KV_FORMATS = gqa.FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of some layers."""

    layers: tuple[int, ...]
    num_experts: int
    width: int
    router: RouterDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model. `experts` None: every layer has an MLP of `ffn_width`."""

    num_layers: int
    vocab_size: int
    max_positions: int
    width: int
    ffn_width: int
    ffn_unit: int  # features of a dense layer that share a scale
    experts: Experts | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool
    qk_norm: gqa.QkNorm
    eps: float
    rope: RopeSpec
    is_tied: bool
    dtype: str
    quantization: str | None

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> "Config":
        """Reads `config.json`; what this family cannot compute is refused by name."""
        name, fields = raw["architectures"][0], Fields(raw)
        fields.require("hidden_act", "silu")
        fields.require("attention_bias", name == QWEN2)
        fields.require("mlp_bias", False)
        if name != LLAMA:
            refuse_sliding_window(fields)
        num_heads, num_kv_heads = read_heads(fields)
        head_dim = _read_head_dim(fields, num_heads)
        return Config(
            num_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            width=fields.integer("hidden_size"),
            ffn_width=fields.integer("intermediate_size"),
            ffn_unit=fields.scale_columns(),
            experts=_read_experts(fields) if name == QWEN3_MOE else None,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            has_qkv_bias=name == QWEN2,
            qk_norm=gqa.QkNorm.HEAD if name in (QWEN3, QWEN3_MOE) else gqa.QkNorm.NONE,
            eps=fields.number("rms_norm_eps", 1e-6),
            rope=read_rope(fields, head_dim)[0],
            is_tied=fields.flag("tie_word_embeddings", False),
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


def _read_head_dim(fields: Fields, num_heads: int) -> int:
    """Qwen3 heads have a width of their own; elsewhere the default is an equal share."""
    width, name = fields.integer("hidden_size"), fields.raw["architectures"][0]
    if fields.raw.get("head_dim") is not None or name == QWEN3:
        return fields.even("head_dim")
    if width % num_heads:
        raise JobError(
            f"config.json: hidden_size {width} is no multiple of num_attention_heads {num_heads}"
        )
    if width // num_heads % 2:
        raise JobError(
            f"config.json: hidden_size {width} / num_attention_heads {num_heads} = "
            f"{width // num_heads} must be even, as rope turns pairs; correct the file"
        )
    return width // num_heads


def _read_experts(fields: Fields) -> Experts | None:
    """Every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise JobError(f"config.json: mlp_only_layers must be a list of layers, not {shown(dense)}")
    step = fields.integer("decoder_sparse_step", 1)
    layers = tuple(
        layer
        for layer in range(fields.integer("num_hidden_layers", most=MAX_LAYERS))
        if (layer + 1) % step == 0 and layer not in dense
    )
    if not layers:
        return None
    # transformers writes num_local_experts, the published files num_experts
    published = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    num_experts = fields.integer(published, most=MAX_EXPERTS)
    active = fields.integer("num_experts_per_tok")
    check_active(fields, active, num_experts)
    return Experts(
        layers=layers,
        num_experts=num_experts,
        width=fields.integer("moe_intermediate_size"),
        router=RouterDims(
            active=active,
            normalise=fields.flag("norm_topk_prob", False),
            scale=1.0,
            scoring=Scoring.SOFTMAX,
        ),
    )


def layout(config: Config, kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
    """k and v of this rank's kv heads in every layer."""
    parts = gqa.parts(config.num_kv_heads, config.head_dim, kv_dtype, placement)
    return KVLayout(layers=(parts,) * config.num_layers, page_tokens=page_tokens)


def build(config: Config, par: Par, ops: Ops) -> Decoder:
    """The model with empty weights."""
    rope = Rope(config.rope)

    def plan_step(step: Step, dtype: torch.dtype) -> Plans:
        return {gqa.KIND: gqa.plan(step, rope, config.head_dim, dtype, ops.reads_pages)}

    def build_layer(index: int) -> Layer:
        attention = gqa.GqaAttention(
            par,
            ops,
            width=config.width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            has_qkv_bias=config.has_qkv_bias,
            qk_norm=config.qk_norm,
        )
        ffn = _build_ffn(config, par, ops, index)
        return Layer(ops, config.width, config.eps, gqa.KIND, attention, ffn)

    return Decoder.assemble(config, par, ops, build_layer, plan_step)


def _build_ffn(config: Config, par: Par, ops: Ops, layer: int) -> Moe | GatedMlp:
    experts = config.experts
    if experts is None or layer not in experts.layers:
        return GatedMlp(par, ops, config.width, config.ffn_width, group_unit=_group_unit(config))
    return Moe(
        par,
        ops,
        width=config.width,
        num_experts=experts.num_experts,
        expert_width=experts.width,
        shared_width=0,
        router=experts.router,
        has_router_bias=False,
    )


def _group_unit(config: Config) -> int | None:
    """Attention groups cut dense layers among experts only: without experts a group would have to
    exchange rows with all others in every layer, where it can well be a copy of the model."""
    return None if config.experts is None else config.ffn_unit


def rules(config: Config) -> tuple[Rule | Skip, ...]:
    """Hugging Face's names."""
    width, head_dim, experts = config.width, config.head_dim, config.experts
    layers = range(config.num_layers)
    found = [
        *outer_rules(config.vocab_size, width, config.is_tied),
        *norm_rules(layers, width),
        *gqa_rules(
            layers, width, config.num_heads, config.num_kv_heads, head_dim, config.has_qkv_bias
        ),
    ]
    if config.qk_norm is gqa.QkNorm.HEAD:
        found += [
            layer_rule(layers, f"self_attn.{name}.weight", f"attention.{name}.weight", (head_dim,))
            for name in ("q_norm", "k_norm")
        ]
    sparse = () if experts is None else experts.layers
    dense = [layer for layer in layers if layer not in sparse]
    found += mlp_rules(dense, width, config.ffn_width, group_unit=_group_unit(config))
    if experts is not None:
        found += moe_rules(sparse, width, experts.width, experts.num_experts)
    return tuple(found)
