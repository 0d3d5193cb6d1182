"""DeepSeek V3.2: V3's experts, with latent attention over the keys that an indexer chooses.

The report is DeepSeek-V3.2's; the indexer rotates its first elements in halves, as the published
weights need (the first demonstration code did not).
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchmla.attention import sparse
from batchmla.attention.mla import MlaForms
from batchmla.errors import JobError
from batchmla.kernels.ops import MlaDims, Ops, RouterDims
from batchmla.kv.layout import KVLayout
from batchmla.kv.step import Step
from batchmla.layers.indexer import IndexerDims
from batchmla.layers.mlp import GatedMlp
from batchmla.layers.rope import Rope, RopeSpec
from batchmla.models.base import Plans
from batchmla.models.decoder import Decoder, Layer, build_moe
from batchmla.models.hf import (
    MAX_EXPERTS,
    MAX_HEAD_WIDTH,
    MAX_LAYERS,
    Fields,
    read_latent_attention,
    read_sigmoid_router,
    shown,
)
from batchmla.models.names import (
    latent_rules,
    layer_rule,
    mlp_rules,
    norm_rules,
    outer_rules,
    shared_moe_rules,
    skip_mtp,
)
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import Rule, Skip

KV_FORMATS = sparse.FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model."""

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
    num_heads: int
    query_rank: int
    attention: MlaDims  # of all heads
    index: IndexerDims
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
        for name in ("attention_bias", "mlp_bias", "indexer_rope_interleave"):
            fields.require(name, False)
        fields.require("rope_interleave", True)
        fields.require("moe_layer_freq", 1)
        attention, rope = read_latent_attention(fields)
        num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        return Config(
            num_layers=num_layers,
            num_dense_layers=_read_dense_layers(fields, num_layers),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            width=fields.integer("hidden_size"),
            ffn_width=fields.integer("intermediate_size"),
            ffn_unit=fields.scale_columns(),
            expert_width=fields.integer("moe_intermediate_size"),
            num_experts=fields.integer("n_routed_experts", most=MAX_EXPERTS),
            num_shared=fields.count("n_shared_experts", 1),
            router=read_sigmoid_router(fields),
            num_heads=attention.heads,
            query_rank=fields.integer("q_lora_rank"),
            attention=attention,
            index=_read_index(fields, attention.rope),
            eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            is_tied=fields.flag("tie_word_embeddings", False),
            num_mtp_layers=fields.count("num_nextn_predict_layers", 1),
            dtype=fields.dtype(),
            quantization=fields.quantization(),
        )

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """Every layer alike."""
        return (sparse.KIND,) * self.num_layers

    @property
    def mha_row_width(self) -> int:
        """Expanded keys and values of every head."""
        return self.num_heads * (self.attention.nope + self.attention.rope + self.attention.value)


def _read_index(fields: Fields, rope_width: int) -> IndexerDims:
    """The indexer, whose heads begin with the rotated elements."""
    dims = IndexerDims(
        heads=fields.integer("index_n_heads", most=MAX_HEAD_WIDTH),
        width=fields.integer("index_head_dim", most=MAX_HEAD_WIDTH),
        rope=rope_width,
        count=fields.integer("index_topk"),
    )
    if dims.width < rope_width:
        raise JobError(
            f"config.json: index_head_dim {dims.width} is less than the qk_rope_head_dim "
            f"{rope_width} that it holds; correct the file"
        )
    return dims


def _read_dense_layers(fields: Fields, num_layers: int) -> int:
    """Leading layers without experts; a list of layer types must say the same."""
    num_dense = min(fields.count("first_k_dense_replace", 3), num_layers)
    kinds = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    if fields.raw.get("mlp_layer_types") not in (None, kinds):
        raise JobError(
            f"config.json: mlp_layer_types {shown(fields.raw['mlp_layer_types'])} is not "
            f"supported, only first_k_dense_replace {num_dense} dense layers before sparse ones"
        )
    return num_dense


def layout(config: Config, kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
    """A latent row and an index key a layer, whatever the placement."""
    dims = config.attention
    parts = sparse.parts(dims.latent, dims.rope, config.index.width, kv_dtype)
    return KVLayout(layers=(parts,) * config.num_layers, page_tokens=page_tokens)


class DeepseekV32(Decoder):
    """`mla_forms` is what early positions are planned with; a caller may pin one."""

    mla_forms: MlaForms


def build(config: Config, par: Par, ops: Ops) -> DeepseekV32:
    """The model with empty weights."""
    rope, whole = Rope(config.rope), config.attention
    dims = replace(whole, heads=par.placement.local(config.num_heads, "attention heads"))

    def plan_step(step: Step, dtype: torch.dtype) -> Plans:
        plan = sparse.plan(
            step, rope, dims, config.index.count, itself.mla_forms, dtype, ops.reads_pages
        )
        return {sparse.KIND: plan}

    def build_layer(index: int) -> Layer:
        attention = sparse.SparseMlaAttention(
            par, ops, width=config.width, query_rank=config.query_rank, dims=dims,
            index=config.index, eps=config.eps,
        )  # fmt: skip
        ffn = build_moe(config, par, ops) if index >= config.num_dense_layers else GatedMlp(
            par, ops, config.width, config.ffn_width, group_unit=config.ffn_unit
        )  # fmt: skip
        return Layer(ops, config.width, config.eps, sparse.KIND, attention, ffn)

    model = DeepseekV32.assemble(config, par, ops, build_layer, plan_step)
    model.mla_forms = MlaForms.CHEAPEST
    itself = weakref.proxy(model)  # it goes with its last user, not when garbage is collected
    return model


def rules(config: Config) -> tuple[Rule | Skip, ...]:
    """Hugging Face's names."""
    everywhere = range(config.num_layers)
    found = outer_rules(config.vocab_size, config.width, config.is_tied)
    if config.num_mtp_layers:
        found.append(skip_mtp(config.num_layers))
    return (
        *found,
        *norm_rules(everywhere, config.width),
        *latent_rules(everywhere, config.width, config.attention, config.query_rank),
        *_indexer_rules(everywhere, config),
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
            True,
        ),
    )


def _indexer_rules(layers: range, config: Config) -> list[Rule]:
    """Its key projection is stacked behind those of the query and the latent."""
    index, rank = config.index, config.query_rank
    shapes: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("wk.weight", "down.weight", (index.width, config.width)),
        ("wq_b.weight", "indexer.query.weight", (index.heads * index.width, rank)),
        ("k_norm.weight", "indexer.key_norm.weight", (index.width,)),
        ("k_norm.bias", "indexer.key_norm.bias", (index.width,)),
        ("weights_proj.weight", "indexer.head_weights", (index.heads, config.width)),
    )
    return [
        layer_rule(layers, f"self_attn.indexer.{source}", f"attention.{target}", shape)
        for source, target, shape in shapes
    ]
