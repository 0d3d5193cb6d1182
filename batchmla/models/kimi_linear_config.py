"""Kimi-Linear's `config.json`, as published and as transformers writes it again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchmla.attention import kda, mla
from batchmla.attention.kda import KdaDims
from batchmla.errors import JobError
from batchmla.kernels.ops import MlaDims, RouterDims
from batchmla.models.hf import (
    MAX_EXPERTS,
    MAX_HEAD_WIDTH,
    MAX_LAYERS,
    Fields,
    check_active,
    shown,
)

LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever `rms_norm_eps` says
TYPES = {"linear_attention": kda.KIND, "full_attention": mla.KIND}
# what only Kimi-K3 has, at the top or beside the widths of its linear attention
K3_FIELDS = (
    "attn_res_block_size", "latent_moe_use_norm", "gate_lower_bound", "use_full_rank_gate",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model. `query_rank` None: queries are projected from the input at once.

    `is_rewritten`: by transformers, which names dense layers as it names those with experts.
    """

    num_layers: int
    is_rewritten: bool
    kinds: tuple[str, ...]
    routed_layers: tuple[int, ...]
    vocab_size: int
    max_positions: int
    width: int
    ffn_width: int
    ffn_unit: int  # features of a dense layer that share a scale
    expert_width: int
    num_experts: int
    num_shared: int
    router: RouterDims
    query_rank: int | None
    latent: MlaDims  # of all heads
    delta: KdaDims  # of all heads
    eps: float
    is_tied: bool
    num_mtp_layers: int
    dtype: str
    quantization: str | None

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> "Config":
        """Reads `config.json`; what this family cannot compute is refused by name."""
        fields = Fields(raw)
        delta = _delta_fields(fields)
        _require(fields, delta)
        num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        num_experts, router = _read_router(fields)
        return Config(
            num_layers=num_layers,
            is_rewritten=raw.get("mlp_layer_types") is not None,
            kinds=_read_kinds(fields, delta, num_layers),
            routed_layers=_read_routed(fields, num_layers),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer(
                _spelled(fields, "model_max_length", "max_position_embeddings")
            ),
            width=fields.integer("hidden_size"),
            ffn_width=fields.integer("intermediate_size"),
            ffn_unit=fields.scale_columns(),
            expert_width=fields.integer("moe_intermediate_size"),
            num_experts=num_experts,
            num_shared=fields.count(_spelled(fields, "num_shared_experts", "n_shared_experts"), 1),
            router=router,
            query_rank=fields.optional("q_lora_rank"),
            latent=_read_latent(fields),
            delta=_read_delta(fields, delta),
            eps=fields.number("rms_norm_eps", 1e-5),
            is_tied=fields.flag("tie_word_embeddings", False),
            num_mtp_layers=fields.count("num_nextn_predict_layers", 0),
            dtype=fields.dtype(),
            quantization=fields.quantization(),
        )

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """By layer."""
        return self.kinds

    @property
    def num_heads(self) -> int:
        return self.latent.heads

    @property
    def mha_row_width(self) -> int:
        """Expanded keys and values of every head of latent attention."""
        return self.latent.heads * (self.latent.nope + self.latent.rope + self.latent.value)


def _spelled(fields: Fields, published: str, rewritten: str) -> str:
    """The one of two names that the file has."""
    return published if fields.raw.get(rewritten) is None else rewritten


def _delta_fields(fields: Fields) -> Fields | None:
    """The published object with the widths of linear attention; None where transformers spread
    it."""
    raw = fields.raw.get("linear_attn_config")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise JobError(f"{fields.where}: linear_attn_config must be an object, not {shown(raw)}")
    return Fields(raw, f"{fields.where}: linear_attn_config")


def _require(fields: Fields, delta: Fields | None) -> None:
    for place in (fields, *(() if delta is None else (delta,))):
        for name in K3_FIELDS:
            if place.raw.get(name) not in (None, False):
                raise JobError(
                    f"{place.where}: {name} {shown(place.raw[name])} is Kimi-K3's, which is not "
                    f"supported: nothing public says what its layers must compute; use Kimi-Linear"
                )
    for name, *allowed in (
        ("hidden_act", "silu"), ("attention_bias", False), ("mla_use_nope", True),
        ("moe_router_activation_func", "sigmoid"), ("moe_layer_freq", 1),
    ):  # fmt: skip
        fields.require(str(name), *allowed)


def _read_kinds(fields: Fields, delta: Fields | None, num_layers: int) -> tuple[str, ...]:
    """Types by name, or lists of layers that count from 1."""
    names = fields.raw.get("layer_types")
    if names is None:
        return _read_lists(fields, delta, num_layers)
    if not isinstance(names, list) or len(names) != num_layers:
        raise JobError(
            f"{fields.where}: layer_types must be a list with an entry for each of the "
            f"{num_layers} layers, not {shown(names)}"
        )
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise JobError(
                f"{fields.where}: layer_types may hold {', '.join(TYPES)}, not {shown(name)}"
            )
    return tuple(TYPES[name] for name in names)


def _read_lists(fields: Fields, delta: Fields | None, num_layers: int) -> tuple[str, ...]:
    if delta is None:
        raise JobError(
            f"{fields.where}: linear_attn_config and layer_types are missing; take the file from "
            f"the model's published revision"
        )
    kinds: list[str | None] = [None] * num_layers
    for name, kind in (("kda_layers", kda.KIND), ("full_attn_layers", mla.KIND)):
        layers = delta.raw.get(name)
        if not isinstance(layers, list) or not all(
            isinstance(at, int) and not isinstance(at, bool) and 1 <= at <= num_layers
            for at in layers
        ):
            raise JobError(
                f"{delta.where}: {name} must be a list of layers from 1 to {num_layers}, not "
                f"{shown(layers)}"
            )
        for layer in layers:
            if kinds[layer - 1] is not None:
                raise JobError(f"{delta.where}: layer {layer} is named twice; correct the file")
            kinds[layer - 1] = kind
    found = tuple(kind for kind in kinds if kind is not None)
    if len(found) < num_layers:
        raise JobError(
            f"{delta.where}: layer {kinds.index(None) + 1} is in neither kda_layers nor "
            f"full_attn_layers; correct the file"
        )
    return found


def _read_routed(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers with experts: by name, or all but the first ones."""
    kinds = fields.raw.get("mlp_layer_types")
    if kinds is None:
        return tuple(range(min(fields.count("first_k_dense_replace", 1), num_layers), num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise JobError(
            f"{fields.where}: mlp_layer_types must say dense or sparse for each of the "
            f"{num_layers} layers, not {shown(kinds)}"
        )
    return tuple(index for index, kind in enumerate(kinds) if kind == "sparse")


def _read_router(fields: Fields) -> tuple[int, RouterDims]:
    """(number of experts, how they are chosen): as DeepSeek V3's, by other names."""
    num_experts = fields.integer(
        _spelled(fields, "num_experts", "num_local_experts"), most=MAX_EXPERTS
    )
    active = fields.integer(_spelled(fields, "num_experts_per_token", "num_experts_per_tok"))
    groups = fields.integer(_spelled(fields, "num_expert_group", "n_group"), 1)
    kept = fields.integer("topk_group", 1)
    if num_experts % groups or kept > groups:
        raise JobError(
            f"{fields.where}: {num_experts} experts do not divide into {groups} groups of which "
            f"topk_group {kept} are kept"
        )
    check_active(fields, active, num_experts // groups * kept)
    router = RouterDims(
        active=active,
        groups=groups,
        kept_groups=kept,
        normalise=fields.flag(_spelled(fields, "moe_renormalize", "norm_topk_prob"), True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return num_experts, router


def _read_latent(fields: Fields) -> MlaDims:
    """DeepSeek's widths; what its other models rotate is plain content here."""
    nope = fields.integer("qk_nope_head_dim", most=MAX_HEAD_WIDTH)
    shared = fields.even("qk_rope_head_dim")
    return MlaDims(
        heads=fields.integer("num_attention_heads"),
        nope=nope,
        rope=shared,
        value=fields.integer("v_head_dim", most=MAX_HEAD_WIDTH),
        latent=fields.integer("kv_lora_rank"),
        scale=(nope + shared) ** -0.5,
    )


def _read_delta(fields: Fields, delta: Fields | None) -> KdaDims:
    place, names = fields, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if delta is not None:
        place, names = delta, ("num_heads", "head_dim", "short_conv_kernel_size")
    taps = place.integer(names[2], 4, most=MAX_HEAD_WIDTH)
    if taps < 2:
        raise JobError(f"{place.where}: {names[2]} {taps} is not supported, only 2 and more")
    return KdaDims(
        heads=place.integer(names[0]),
        width=place.integer(names[1], most=MAX_HEAD_WIDTH),
        taps=taps,
    )
