"""DeepSeek V2, V2-Lite, V3, R1, V3.1, Kimi-K2 and the text of Kimi-K2.5: latent attention, routed
and shared experts.

V2 routes by softmax scores (DeepSeek-V2 report), the others by sigmoid scores with a correction
bias (DeepSeek-V3 report); Kimi-K2 is a V3 with one group, and Kimi-K2.5 a K2 inside a model that
also sees.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchmla.attention import mla
from batchmla.kernels.ops import MlaDims, Ops, RouterDims, Scoring
from batchmla.kv.layout import KVLayout
from batchmla.kv.step import Step
from batchmla.layers.mlp import GatedMlp
from batchmla.layers.rope import Rope, RopeSpec
from batchmla.models.base import Plans
from batchmla.models.decoder import Decoder, Ffn, Layer, build_moe
from batchmla.models.hf import (
    MAX_EXPERTS,
    MAX_LAYERS,
    Fields,
    read_active,
    read_latent_attention,
    read_sigmoid_router,
    read_text_part,
)
from batchmla.models.names import (
    behind_prefix,
    latent_rules,
    mlp_rules,
    norm_rules,
    outer_rules,
    shared_moe_rules,
    skip_mtp,
)
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import Rule, Skip

V2 = "DeepseekV2ForCausalLM"
KV_FORMATS = mla.FORMATS
# wrappers, as published and as transformers spells it, and what their text tensors start with
K25 = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
K25_PREFIX = "language_model."
K25_VISION = r"(model\.)?(vision_tower|mm_projector)\..*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model. `query_rank` None: queries are projected from the input at once."""

    num_layers: int
    num_dense_layers: int
    vocab_size: int
    max_positions: int
    width: int
    ffn_width: int
    ffn_unit: int  # features of a dense layer that share a scale
    expert_width: int
    num_experts: int
    num_shared: int
    router: RouterDims
    has_router_bias: bool
    num_heads: int
    query_rank: int | None
    attention: MlaDims  # of all heads
    eps: float
    rope: RopeSpec
    is_tied: bool
    num_mtp_layers: int
    dtype: str
    quantization: str | None
    is_wrapped: bool

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> "Config":
        """Reads `config.json`; what this family cannot compute is refused by name."""
        name = raw["architectures"][0]
        is_v2, is_wrapped = name == V2, name in K25
        fields = read_text_part(raw) if is_wrapped else Fields(raw)
        fields.require("hidden_act", "silu")
        for name in ("attention_bias", "mlp_bias"):
            fields.require(name, False)
        fields.require("rope_interleave", True)
        fields.require("moe_layer_freq", 1)
        attention, rope = read_latent_attention(fields)
        num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        return Config(
            num_layers=num_layers,
            num_dense_layers=min(
                fields.count("first_k_dense_replace", 0 if is_v2 else 3), num_layers
            ),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            width=fields.integer("hidden_size"),
            ffn_width=fields.integer("intermediate_size"),
            ffn_unit=fields.scale_columns(),
            expert_width=fields.integer("moe_intermediate_size"),
            num_experts=fields.integer("n_routed_experts", most=MAX_EXPERTS),
            num_shared=fields.count("n_shared_experts", 2 if is_v2 else 1),
            router=_read_v2_router(fields) if is_v2 else read_sigmoid_router(fields),
            has_router_bias=not is_v2,
            num_heads=attention.heads,
            query_rank=fields.optional("q_lora_rank"),
            attention=attention,
            eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            is_tied=fields.flag("tie_word_embeddings", False),
            num_mtp_layers=fields.count("num_nextn_predict_layers", 0 if is_v2 else 1),
            dtype=fields.dtype(),
            quantization=fields.quantization(),
            is_wrapped=is_wrapped,
        )

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """Every layer alike."""
        return (mla.KIND,) * self.num_layers

    @property
    def mha_row_width(self) -> int:
        """Expanded keys and values of every head."""
        return self.num_heads * (self.attention.nope + self.attention.rope + self.attention.value)


def _read_v2_router(fields: Fields) -> RouterDims:
    """V2: groups rank by their best, and only if the method limits them.

    What `norm_topk_prob` adds is not settled: DeepSeek's code then drops the scaling factor,
    transformers ignores the field. Every published V2 has it off.
    """
    fields.require("scoring_func", "softmax")
    fields.require("topk_method", "greedy", "group_limited_greedy")
    fields.require("norm_topk_prob", False)
    groups = kept = 1
    if fields.raw.get("topk_method") == "group_limited_greedy":
        groups, kept = fields.integer("n_group"), fields.integer("topk_group")
    return RouterDims(
        active=read_active(fields, groups, kept),
        groups=groups,
        kept_groups=kept,
        normalise=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        scoring=Scoring.SOFTMAX,
        group_best=1,
    )


def layout(config: Config, kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
    """One latent row a layer, whatever the placement."""
    parts = mla.parts(config.attention.latent, config.attention.rope, kv_dtype)
    return KVLayout(layers=(parts,) * config.num_layers, page_tokens=page_tokens)


class DeepseekV3(Decoder):
    """`mla_forms` is what `plan` chooses from; a caller may pin one."""

    mla_forms: mla.MlaForms


def build(config: Config, par: Par, ops: Ops) -> DeepseekV3:
    """The model with empty weights."""
    rope, whole = Rope(config.rope), config.attention
    dims = replace(whole, heads=par.placement.local(config.num_heads, "attention heads"))

    def plan_step(step: Step, dtype: torch.dtype) -> Plans:
        forms = itself.mla_forms
        return {mla.KIND: mla.plan(step, rope, dims, forms, dtype, ops.reads_pages)}

    def build_layer(index: int) -> Layer:
        attention = mla.MlaAttention(
            par, ops, width=config.width, query_rank=config.query_rank, dims=dims, eps=config.eps
        )
        ffn: Ffn = GatedMlp(par, ops, config.width, config.ffn_width, group_unit=config.ffn_unit)
        if index >= config.num_dense_layers:
            ffn = build_moe(config, par, ops, has_router_bias=config.has_router_bias)
        return Layer(ops, config.width, config.eps, mla.KIND, attention, ffn)

    model = DeepseekV3.assemble(config, par, ops, build_layer, plan_step)
    model.mla_forms = mla.MlaForms.CHEAPEST
    itself = weakref.proxy(model)  # it goes with its last user, not when garbage is collected
    return model


def rules(config: Config) -> tuple[Rule | Skip, ...]:
    """Hugging Face's names."""
    if not config.is_wrapped:
        return _text_rules(config)
    vision = Skip(pattern=K25_VISION, reason="images and videos are not read")
    return (*behind_prefix(K25_PREFIX, _text_rules(config)), vision)


def _text_rules(config: Config) -> tuple[Rule | Skip, ...]:
    everywhere = range(config.num_layers)
    found = outer_rules(config.vocab_size, config.width, config.is_tied)
    if config.num_mtp_layers:
        found.append(skip_mtp(config.num_layers))
    return (
        *found,
        *norm_rules(everywhere, config.width),
        *latent_rules(everywhere, config.width, config.attention, config.query_rank),
        *mlp_rules(
            everywhere[: config.num_dense_layers],
            config.width,
            config.ffn_width,
            group_unit=config.ffn_unit,
        ),
        *shared_moe_rules(
            everywhere[config.num_dense_layers :],
            config.width,
            config.expert_width,
            config.num_experts,
            config.num_shared * config.expert_width,
            config.has_router_bias,
        ),
    )
