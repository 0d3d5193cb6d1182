"""Llama: grouped-query attention and gated MLPs (SmolLM2, Llama 3, the Llama distills of R1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from batchmla.attention import gqa
from batchmla.errors import JobError
from batchmla.kernels.ops import Ops
from batchmla.kv.layout import KVLayout
from batchmla.kv.step import Step
from batchmla.layers.embed import Embedding, Head
from batchmla.layers.mlp import GatedMlp
from batchmla.layers.norm import RmsNorm
from batchmla.layers.rope import Rope, RopeSpec
from batchmla.models.base import Plans
from batchmla.models.decoder import Decoder, Layer
from batchmla.models.hf import Fields, read_rope
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import Rule, Skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model. The two flags are what sets later members of the family apart."""

    num_layers: int
    vocab_size: int
    max_positions: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: RopeSpec
    is_tied: bool
    dtype: str
    quantization: str | None = None
    has_qkv_bias: bool = False
    has_head_norms: bool = False

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> "Config":
        """Reads `config.json`; what this family cannot compute is refused by name."""
        fields = Fields(raw)
        fields.require("hidden_act", "silu")
        for name in ("attention_bias", "mlp_bias"):
            fields.require(name, False)
        width, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if raw.get("head_dim") is None and width % num_heads:
            raise JobError(
                f"config.json: hidden_size {width} is no multiple of num_attention_heads "
                f"{num_heads}"
            )
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise JobError(
                f"config.json: num_attention_heads {num_heads} is no multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        head_dim = fields.integer("head_dim", width // num_heads)
        return Config(
            num_layers=fields.integer("num_hidden_layers"),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            width=width,
            ffn_width=fields.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
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


def layout(config: Config, kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
    """k and v of this rank's kv heads in every layer."""
    parts = gqa.parts(config.num_kv_heads, config.head_dim, kv_dtype, placement)
    return KVLayout(layers=(parts,) * config.num_layers, page_tokens=page_tokens)


def build(config: Config, par: Par, ops: Ops) -> Decoder:
    """The model with empty weights."""
    rope = Rope(config.rope)

    def plan_step(step: Step, dtype: torch.dtype) -> Plans:
        return {gqa.KIND: gqa.plan(step, rope, dtype)}

    def build_layer() -> Layer:
        attention = gqa.GqaAttention(
            par,
            ops,
            width=config.width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            has_qkv_bias=config.has_qkv_bias,
            head_norm_eps=config.eps if config.has_head_norms else None,
        )
        ffn = GatedMlp(par, ops, config.width, config.ffn_width)
        return Layer(ops, config.width, config.eps, gqa.KIND, attention, ffn)

    embed = Embedding(par, config.vocab_size, config.width)
    head = Head(par, ops, config.vocab_size, config.width, embed if config.is_tied else None)
    layers = tuple(build_layer() for _ in range(config.num_layers))
    return Decoder(embed, layers, RmsNorm(ops, config.width, config.eps), head, plan_step)


def rules(config: Config) -> tuple[Rule | Skip, ...]:
    """Hugging Face's names."""
    width, q_width = config.width, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    found: list[Rule | Skip] = [
        Rule(source="model.embed_tokens.weight", target="embed.weight",
             shape=(config.vocab_size, width), shard_axis=0),
        Rule(source="model.norm.weight", target="norm.weight", shape=(width,)),
        Skip(pattern=r".*\.rotary_emb\.inv_freq", reason="rotary frequencies are computed"),
    ]  # fmt: skip
    if config.is_tied:
        found.append(Skip(pattern=r"lm_head\.weight", reason="the head is tied to the embedding"))
    else:
        found.append(
            Rule(source="lm_head.weight", target="head.weight",
                 shape=(config.vocab_size, width), shard_axis=0)
        )  # fmt: skip

    def add(source: str, target: str, shape: tuple[int, ...], shard_axis: int | None) -> None:
        found.append(
            Rule(source=f"model.layers.{{layer}}.{source}", target=f"layers.{{layer}}.{target}",
                 shape=shape, shard_axis=shard_axis, layers=range(config.num_layers))
        )  # fmt: skip

    add("input_layernorm.weight", "attention_norm.weight", (width,), None)
    add("post_attention_layernorm.weight", "ffn_norm.weight", (width,), None)
    for name, rows in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        add(f"self_attn.{name}_proj.weight", "attention.qkv.weight", (rows, width), 0)
        if config.has_qkv_bias:
            add(f"self_attn.{name}_proj.bias", "attention.qkv.bias", (rows,), 0)
        if config.has_head_norms and name != "v":
            add(f"self_attn.{name}_norm.weight", f"attention.{name}_norm.weight",
                (config.head_dim,), None)  # fmt: skip
    add("self_attn.o_proj.weight", "attention.out.weight", (width, q_width), 1)
    for name in ("gate", "up"):
        add(f"mlp.{name}_proj.weight", "ffn.up.weight", (config.ffn_width, width), 0)
    add("mlp.down_proj.weight", "ffn.down.weight", (width, config.ffn_width), 1)
    return tuple(found)
