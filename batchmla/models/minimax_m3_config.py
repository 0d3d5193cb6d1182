"""MiniMax-M3's `config.json`, as published and as transformers writes it again: the text model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchmla.attention import block_sparse, gqa
from batchmla.attention.block_sparse import BlockSparseWidths
from batchmla.errors import JobError
from batchmla.kernels.block_sparse_ops import BlockDims, OaiGate
from batchmla.kernels.ops import RouterDims
from batchmla.layers.oai_moe import OaiMoeDims
from batchmla.layers.rope import RopeSpec
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

WHERE = "config.json: text_config"
SHARED_FIELDS = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")
ATTENTION_TYPES = {"full_attention": False, "minimax_m3_sparse": True}
MLP_TYPES = {"dense": False, "sparse": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model: which layers choose blocks of keys, and which have experts."""

    chooses: tuple[bool, ...]
    routes: tuple[bool, ...]
    vocab_size: int
    max_positions: int
    ffn_width: int  # of layers without experts
    ffn_unit: int  # features of those that share a scale
    moe: OaiMoeDims
    attention: BlockSparseWidths
    blocks: BlockDims
    eps: float
    rope: RopeSpec
    is_tied: bool
    dtype: str
    quantization: str | None

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> "Config":
        """Reads `config.json`; what this family cannot compute is refused by name."""
        fields = _text_fields(raw)
        _require(fields)
        sparse = _sparse_fields(fields)
        num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        width = fields.integer("hidden_size")
        attention = _read_attention(fields, sparse, width)
        return Config(
            chooses=_read_layers(
                (fields, "layer_types"), (sparse, "sparse_attention_freq"), ATTENTION_TYPES,
                num_layers,
            ),
            routes=_read_layers(
                (fields, "mlp_layer_types"), (fields, "moe_layer_freq"), MLP_TYPES, num_layers
            ),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            ffn_width=fields.integer("dense_intermediate_size"),
            ffn_unit=fields.scale_columns(),
            moe=_read_moe(fields, width),
            attention=attention,
            blocks=_read_blocks(fields, sparse),
            eps=fields.number("rms_norm_eps", 1e-6),
            rope=_read_rope(fields, attention),
            is_tied=fields.flag("tie_word_embeddings", False),
            dtype=fields.dtype(),
            quantization=fields.quantization(),
        )  # fmt: skip

    @property
    def num_layers(self) -> int:
        return len(self.chooses)

    @property
    def width(self) -> int:
        return self.attention.model

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """By layer."""
        return tuple(block_sparse.KIND if one else gqa.KIND for one in self.chooses)

    @property
    def mha_row_width(self) -> int:
        """K and V of every query head."""
        return 2 * self.attention.num_heads * self.attention.head_dim


def _text_fields(raw: Mapping[str, Any]) -> Fields:
    """The text model's part, with what the whole model's says for it."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise JobError(
            f"{WHERE} must be an object with the text model's fields, not {shown(text)}: take it "
            f"from the model's published config.json"
        )
    outer = {name: raw[name] for name in SHARED_FIELDS if raw.get(name) is not None}
    return Fields(outer | {name: value for name, value in text.items() if value is not None}, WHERE)


def _require(fields: Fields) -> None:
    for name, *allowed in (
        ("hidden_act", "swigluoai", "silu"), ("scoring_func", "sigmoid"),
        ("use_routing_bias", True), ("use_qk_norm", True), ("qk_norm_type", "per_head"),
        ("use_gemma_norm", True), ("n_shared_experts", 1), ("attention_bias", False),
        ("norm_topk_prob", True), ("attention_output_gate", False),
    ):  # fmt: skip
        fields.require(name, *allowed)
    if fields.raw.get("sliding_window") is not None:
        raise JobError(
            f"{fields.where}: sliding_window {shown(fields.raw['sliding_window'])} is not supported"
        )


def _sparse_fields(fields: Fields) -> Fields:
    """`sparse_attention_config`, empty where the fields stand in the text model's own names."""
    raw = fields.raw.get("sparse_attention_config") or {}
    if not isinstance(raw, Mapping):
        raise JobError(
            f"{fields.where}: sparse_attention_config must be an object, not {shown(raw)}"
        )
    sparse = Fields(raw, f"{fields.where}: sparse_attention_config")
    sparse.require("use_sparse_attention", True)
    sparse.require("sparse_score_type", "max")
    sparse.require("sparse_init_block", 0)
    has_values = raw.get("sparse_disable_index_value")
    if has_values is not None and has_values != raw.get("sparse_attention_freq"):
        raise JobError(
            f"{sparse.where}: sparse_disable_index_value must name the layers of "
            f"sparse_attention_freq, as index values are not supported"
        )
    return sparse


def _read_attention(fields: Fields, sparse: Fields, width: int) -> BlockSparseWidths:
    num_heads, num_kv_heads = read_heads(fields)
    index_heads, index_dim = (
        _either(fields, *names) for names in (
            ("index_n_heads", sparse, "sparse_num_index_heads"),
            ("index_head_dim", sparse, "sparse_index_dim"),
        )
    )  # fmt: skip
    if index_heads != num_kv_heads:
        raise JobError(
            f"{fields.where}: {index_heads} index heads for num_key_value_heads {num_kv_heads} are "
            f"not supported, only one for each"
        )
    return BlockSparseWidths(
        model=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", most=MAX_HEAD_WIDTH),
        index_dim=index_dim,
    )


def _either(fields: Fields, name: str, sparse: Fields, published: str) -> int:
    """A width or number under its published name, or under transformers'."""
    if sparse.raw.get(published) is None:
        return fields.integer(name, most=MAX_HEAD_WIDTH)
    value = sparse.integer(published, most=MAX_HEAD_WIDTH)
    fields.require(name, value)
    return value


def _read_blocks(fields: Fields, sparse: Fields) -> BlockDims:
    """The keys that a row reads; its own block counts among those that are forced."""
    place, name = (
        (fields, "index_local_blocks")
        if sparse.raw.get("sparse_local_block") is None
        else (sparse, "sparse_local_block")
    )
    dims = BlockDims(
        block_tokens=_either(fields, "index_block_size", sparse, "sparse_block_size"),
        count=_either(fields, "index_topk_blocks", sparse, "sparse_topk_blocks"),
        forced=place.count(name, 1),
    )
    if dims.forced > dims.count:
        raise JobError(
            f"{place.where}: {name} {dims.forced} exceeds the {dims.count} blocks that a row "
            f"reads; correct the file"
        )
    return dims


def _read_layers(
    by_type: tuple[Fields, str],
    by_number: tuple[Fields, str],
    types: Mapping[str, bool],
    num_layers: int,
) -> tuple[bool, ...]:
    """One word or one 0 or 1 for every layer; where both are given they must agree."""
    found = []
    for (place, name), known in ((by_type, types), (by_number, {0: False, 1: True})):
        given = place.raw.get(name)
        if given is None:
            continue
        if not isinstance(given, list) or len(given) != num_layers:
            raise JobError(
                f"{place.where}: {name} must be a list with an entry for each of the {num_layers} "
                f"layers, not {shown(given)}"
            )
        for value in given:
            if isinstance(value, bool | float | list | dict) or value not in known:
                allowed = ", ".join(map(str, known))
                raise JobError(f"{place.where}: {name} may hold {allowed}, not {shown(value)}")
        found.append(tuple(known[value] for value in given))
    if not found:
        raise JobError(f"{by_type[0].where}: neither {by_type[1]} nor {by_number[1]} is given")
    if found[0] != found[-1]:
        raise JobError(
            f"{by_type[0].where}: {by_type[1]} and {by_number[1]} contradict each other; correct "
            f"the file"
        )
    return found[0]


def _read_moe(fields: Fields, width: int) -> OaiMoeDims:
    num_experts = fields.integer("num_local_experts", most=MAX_EXPERTS)
    active = fields.integer("num_experts_per_tok")
    check_active(fields, active, num_experts)
    return OaiMoeDims(
        width=width,
        num_experts=num_experts,
        expert_width=fields.integer("intermediate_size"),
        shared_width=fields.integer("shared_intermediate_size"),
        router=RouterDims(
            active=active, normalise=True, scale=fields.number("routed_scaling_factor", 2.0)
        ),
        gate=OaiGate(
            alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0)
        ),
    )


def _read_rope(fields: Fields, attention: BlockSparseWidths) -> RopeSpec:
    """The share of a head that is rotated, or its width; an index head has that width too."""
    nested = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    given = fields.raw.get("partial_rotary_factor")
    if given is None and isinstance(nested, Mapping):
        given = nested.get("partial_rotary_factor")
    if given is None:
        width = fields.integer("rotary_dim", attention.head_dim)
    elif isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1:
        raise JobError(
            f"{fields.where}: partial_rotary_factor must be a number above 0 and at most 1, not "
            f"{shown(given)}"
        )
    else:
        width = int(attention.head_dim * given)
        fields.require("rotary_dim", width)
    if width < 2 or width % 2 or width > min(attention.head_dim, attention.index_dim):
        raise JobError(
            f"{fields.where}: rotary_dim {width} must be an even width within head_dim "
            f"{attention.head_dim} and the index head's {attention.index_dim}"
        )
    return read_rope(fields, width, share=width / attention.head_dim, default_theta=5e6)[0]
