"""DeepSeek V4's `config.json`, as published and as transformers writes it again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchmla.attention.hybrid import HybridWidths
from batchmla.attention.hybrid_parts import HybridDims, LayerKind
from batchmla.errors import JobError
from batchmla.layers.clamped_moe import ClampedMoeDims
from batchmla.layers.hyper import HyperDims
from batchmla.layers.rope import RopeSpec
from batchmla.models.hf import (
    MAX_EXPERTS,
    MAX_HEAD_WIDTH,
    MAX_LAYERS,
    Fields,
    check_active,
    read_rope,
    shown,
)

RATIOS = {0: LayerKind.WINDOW, 4: LayerKind.CHOSEN, 128: LayerKind.ALL}
TYPES = {
    "sliding_attention": LayerKind.WINDOW,
    "compressed_sparse_attention": LayerKind.CHOSEN,
    "heavily_compressed_attention": LayerKind.ALL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model. Layers without entries rotate by `window_rope`, the others by `entry_rope`."""

    num_layers: int
    num_hash_layers: int  # leading ones, whose experts follow from token ids
    kinds: tuple[LayerKind, ...]
    vocab_size: int
    max_positions: int
    width: int
    attention: HybridWidths
    dims: HybridDims
    moe: ClampedMoeDims
    hyper: HyperDims
    eps: float
    window_rope: RopeSpec
    entry_rope: RopeSpec
    is_tied: bool
    dtype: str
    quantization: str | None

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> "Config":
        """Reads `config.json`; what this family cannot compute is refused by name."""
        fields = Fields(raw)
        _require(fields)
        width, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps", 1e-6)
        num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        attention, dims = _read_attention(fields, width, eps), _read_dims(fields)
        if attention.heads % attention.groups:
            raise JobError(
                f"config.json: num_attention_heads {attention.heads} is no multiple of o_groups "
                f"{attention.groups}; correct the file"
            )
        window_rope, entry_rope = _read_ropes(fields, dims)
        return Config(
            num_layers=num_layers,
            num_hash_layers=_read_hash_layers(fields, num_layers),
            kinds=_read_kinds(fields, num_layers),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            width=width,
            attention=attention,
            dims=dims,
            moe=_read_moe(fields, width),
            hyper=HyperDims(
                streams=fields.integer("hc_mult", 4),
                width=width,
                rounds=fields.integer("hc_sinkhorn_iters", 20),
                eps=fields.number("hc_eps", 1e-6),
                norm_eps=eps,
            ),
            eps=eps,
            window_rope=window_rope,
            entry_rope=entry_rope,
            is_tied=fields.flag("tie_word_embeddings", False),
            dtype=fields.dtype(),
            quantization=fields.quantization(),
        )

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """By layer."""
        return tuple(kind.value for kind in self.kinds)

    @property
    def num_heads(self) -> int:
        return self.attention.heads

    @property
    def mha_row_width(self) -> int:
        """Keys and values of every head."""
        return 2 * self.attention.heads * self.dims.width

    @property
    def page_multiple(self) -> int:
        """Tokens of which a page must hold whole runs, for the layers' entries."""
        return max((self.dims.ratio(kind) for kind in self.kinds if kind in _WITH_ENTRIES),
                   default=1)  # fmt: skip

    def rope(self, kind: LayerKind) -> RopeSpec:
        """One table for everything that such a layer rotates."""
        return self.window_rope if kind is LayerKind.WINDOW else self.entry_rope


_WITH_ENTRIES = (LayerKind.CHOSEN, LayerKind.ALL)


def _require(fields: Fields) -> None:
    for name, allowed in (
        ("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False),
        ("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True),
        ("first_k_dense_replace", 0), ("num_key_value_heads", 1),
    ):  # fmt: skip
        fields.require(name, allowed)


def _read_attention(fields: Fields, width: int, eps: float) -> HybridWidths:
    return HybridWidths(
        model=width,
        heads=fields.integer("num_attention_heads"),
        query_rank=fields.integer("q_lora_rank"),
        groups=fields.integer("o_groups"),
        group_rank=fields.integer("o_lora_rank"),
        index_heads=fields.integer("index_n_heads", most=MAX_HEAD_WIDTH),
        chosen=fields.integer("index_topk"),
        eps=eps,
    )


def _read_dims(fields: Fields) -> HybridDims:
    """A head's last elements are rotated: so many, or that part of it."""
    width = fields.even("head_dim")
    share = fields.raw.get("partial_rotary_factor")
    if fields.raw.get("qk_rope_head_dim") is not None or not isinstance(share, int | float):
        rope = fields.even("qk_rope_head_dim")
    else:
        rope = int(width * share)
    index_width = fields.even("index_head_dim")
    if rope > min(width, index_width) or rope < 2 or rope % 2:
        raise JobError(
            f"config.json: qk_rope_head_dim {rope} does not fit head_dim {width} and "
            f"index_head_dim {index_width}; correct the file"
        )
    rates = fields.raw.get("compress_rates") or {}
    if not isinstance(rates, Mapping):
        raise JobError(f"config.json: compress_rates must be an object, not {shown(rates)}")
    each = Fields(rates, "config.json: compress_rates")
    return HybridDims(
        width=width,
        rope=rope,
        window=fields.integer("sliding_window"),
        index_width=index_width,
        chosen_ratio=each.integer("compressed_sparse_attention", 4),
        all_ratio=each.integer("heavily_compressed_attention", 128),
    )


def _read_moe(fields: Fields, width: int) -> ClampedMoeDims:
    num_experts = fields.integer("n_routed_experts", most=MAX_EXPERTS)
    active, expert_width = (
        fields.integer("num_experts_per_tok"), fields.integer("moe_intermediate_size"),
    )  # fmt: skip
    check_active(fields, active, num_experts)
    return ClampedMoeDims(
        width=width,
        num_experts=num_experts,
        active=active,
        expert_width=expert_width,
        shared_width=fields.count("n_shared_experts", 1) * expert_width,
        scale=fields.number("routed_scaling_factor", 1.0),
        limit=fields.number("swiglu_limit"),
        vocab_size=fields.integer("vocab_size"),
    )


def _read_kinds(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """Types by name, or ratios by number: entries behind the last layer are a draft head's."""
    names, ratios = fields.raw.get("layer_types"), fields.raw.get("compress_ratios")
    given, known = (ratios, RATIOS) if names is None else (names, TYPES)
    word = "compress_ratios" if names is None else "layer_types"
    if not isinstance(given, list) or len(given) < num_layers:
        raise JobError(
            f"config.json: {word} must be a list with an entry for each of the {num_layers} "
            f"layers, not {shown(given)}"
        )
    kinds = []
    for value in given[:num_layers]:
        if isinstance(value, bool) or not isinstance(value, int | str) or value not in known:
            allowed = ", ".join(map(str, known))
            raise JobError(f"config.json: {word} may hold {allowed}, not {shown(value)}")
        kinds.append(known[value])  # type: ignore[index]
    return tuple(kinds)


def _read_hash_layers(fields: Fields, num_layers: int) -> int:
    """Leading layers that choose experts by token id."""
    kinds = fields.raw.get("mlp_layer_types")
    if kinds is None:
        return min(fields.count("num_hash_layers", 3), num_layers)
    count = kinds.count("hash_moe") if isinstance(kinds, list) else 0
    if kinds != ["hash_moe"] * count + ["moe"] * (num_layers - count):
        raise JobError(
            f"config.json: mlp_layer_types {shown(kinds)} is not supported, only hash_moe layers "
            f"before moe layers"
        )
    return count


def _read_ropes(fields: Fields, dims: HybridDims) -> tuple[RopeSpec, RopeSpec]:
    """(window layers: plain; the others: another base and the stretching, magnitudes kept)."""
    given = fields.raw.get("rope_parameters")
    nested = given if isinstance(given, Mapping) and "compress" in given else None
    if nested is None:
        stretch = fields.raw.get("rope_scaling") or given or {}
        if not isinstance(stretch, Mapping):
            raise JobError(f"config.json: rope_scaling must be an object, not {shown(stretch)}")
        main = {"rope_theta": fields.number("rope_theta", 10000.0)}
        entry = {**stretch, "rope_theta": fields.number("compress_rope_theta")}
    else:
        main, entry = nested.get("main") or {}, nested["compress"]
        if not isinstance(main, Mapping) or not isinstance(entry, Mapping):
            raise JobError("config.json: rope_parameters must hold objects main and compress")
    share = dims.rope / dims.width
    specs = [
        read_rope(Fields({"rope_parameters": {"attention_factor": 1.0, **each}}), dims.rope, share)
        for each in (main, entry)
    ]
    return specs[0][0], specs[1][0]
