"""Reads a Hugging Face `config.json` strictly: what matters is there, understood, or refused by
name."""

import json
from collections.abc import Mapping
from typing import Any

from batchmla.errors import JobError
from batchmla.kernels.ops import MlaDims, RouterDims
from batchmla.layers.rope import RopeKind, RopeSpec, yarn_magnitude
from batchmla.weights.quant_config import read_quantisation

DTYPES = ("bfloat16", "float16", "float32")

# Far beyond every model, and small enough that shapes can be counted without building them.
MAX_SIZE = 2**31 - 1
MAX_HEAD_WIDTH = 2**16
MAX_LAYERS = 10_000
MAX_EXPERTS = 10_000


class Fields:
    """Typed access to the fields of one config."""

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where

    def integer(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A positive integer of at most `most`."""
        value = self._given(name, "a positive integer") if default is None else self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise JobError(f"{self.where}: {name} must be a positive integer, not {shown(value)}")
        if value > most:
            raise JobError(f"{self.where}: {name} {shown(value)} exceeds {most}; correct the file")
        return value

    def even(self, name: str, most: int = MAX_HEAD_WIDTH) -> int:
        """An even width: rotated elements go in pairs."""
        value = self.integer(name, most=most)
        if value % 2:
            raise JobError(
                f"{self.where}: {name} {value} must be even, as rope turns pairs; correct the file"
            )
        return value

    def optional(self, name: str) -> int | None:
        """A positive integer, or None where it is null or absent."""
        return None if self.raw.get(name) is None else self.integer(name)

    def count(self, name: str, default: int, most: int = MAX_SIZE) -> int:
        """An integer that may be 0."""
        value = self.raw.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value == 0:
            return 0
        return default if value is None else self.integer(name, most=most)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self._given(name, "a positive number") if default is None else self.raw.get(name)
        if value is None and default is not None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 1e-30 < value < 1e30
        ):
            raise JobError(f"{self.where}: {name} must be a positive number, not {shown(value)}")
        return float(value)

    def _given(self, name: str, needed: str) -> Any:
        """The value of a field that has no default."""
        value = self.raw.get(name)
        if value is None:
            word = "is null" if name in self.raw else "is missing"
            raise JobError(
                f"{self.where}: {name} {word}; it must be {needed}: take it from the model's "
                f"published config.json"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise JobError(f"{self.where}: {name} must be true or false, not {shown(value)}")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Refuses every value but the allowed ones; an absent or null field means the first."""
        value = self.raw.get(name)
        if value is not None and value not in allowed:
            listed = " or ".join(shown(each) for each in allowed)
            raise JobError(f"{self.where}: {name} {shown(value)} is not supported, only {listed}")

    def dtype(self) -> str:
        """`dtype`, or `torch_dtype` as older files spell it.

        Where neither is given: bfloat16 beside quantised weights, else float32.
        """
        default = "float32" if self.raw.get("quantization_config") is None else "bfloat16"
        value = self.raw.get("dtype") or self.raw.get("torch_dtype") or default
        if value not in DTYPES:
            raise JobError(f"{self.where}: dtype {shown(value)} is not one of {', '.join(DTYPES)}")
        return str(value)

    def quantization(self) -> str | None:
        """The method of `quantization_config`, None without one."""
        value = self.raw.get("quantization_config")
        if value is None:
            return None
        if not isinstance(value, Mapping) or not isinstance(value.get("quant_method"), str):
            raise JobError(
                f"{self.where}: quantization_config names no quant_method: {shown(value)}"
            )
        return str(value["quant_method"])

    def scale_columns(self) -> int:
        """Columns of a matrix that share a scale: 1 of plain weights, and of those that are refused
        where they are read."""
        try:
            said = read_quantisation(self.raw)
        except JobError:
            return 1
        return 1 if said is None else said.matrices.block_columns


def read_text_part(raw: Mapping[str, Any]) -> Fields:
    """The text model's fields inside a model that also sees, with what the whole says for it."""
    where, text = "config.json: text_config", raw.get("text_config")
    if not isinstance(text, Mapping):
        raise JobError(
            f"{where} must be an object with the text model's fields, not {shown(text)}; take it "
            f"from the model's published config.json"
        )
    said = {name: value for name, value in text.items() if value is not None}
    shared = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")
    return Fields({name: raw[name] for name in shared if raw.get(name) is not None} | said, where)


def shown(value: Any) -> str:
    """A value as `config.json` spells it, in short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def refuse_sliding_window(fields: Fields) -> None:
    """A window that some layer uses, as Qwen's configs say it: `layer_types`, or the switch."""
    kinds = fields.raw.get("layer_types")
    if kinds is not None:
        if (
            not isinstance(kinds, list)
            or not kinds
            or any(kind != "full_attention" for kind in kinds)
        ):
            raise JobError(
                f"{fields.where}: layer_types may name full_attention only, not {shown(kinds)}: "
                f"sliding windows are not supported"
            )
    elif fields.flag("use_sliding_window", False) and fields.raw.get("sliding_window") is not None:
        raise JobError(
            f"{fields.where}: use_sliding_window with sliding_window "
            f"{shown(fields.raw['sliding_window'])} is not supported; set it to false if no "
            f"text will be longer than the window"
        )


def read_heads(fields: Fields) -> tuple[int, int]:
    """Query heads and kv heads, which divide them; without kv heads every head has its own."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise JobError(
            f"{fields.where}: num_attention_heads {num_heads} is no multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    return num_heads, num_kv_heads


def check_active(fields: Fields, active: int, num_experts: int) -> None:
    """Refuses to choose more experts than there are."""
    if active > num_experts:
        raise JobError(
            f"{fields.where}: num_experts_per_tok {active} exceeds the {num_experts} experts"
        )


def read_sigmoid_router(fields: Fields) -> RouterDims:
    """DeepSeek V3's: groups rank by their two best, weights are normalised if the config says
    so."""
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    groups, kept = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    return RouterDims(
        active=read_active(fields, groups, kept),
        groups=groups,
        kept_groups=kept,
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def read_active(fields: Fields, groups: int, kept: int) -> int:
    """The number of active experts, which the kept of the experts' groups must hold."""
    num_experts = fields.integer("n_routed_experts", most=MAX_EXPERTS)
    active = fields.integer("num_experts_per_tok")
    if num_experts % groups or kept > groups:
        raise JobError(
            f"config.json: {num_experts} experts do not divide into n_group {groups} groups of "
            f"which topk_group {kept} are kept"
        )
    if active > num_experts // groups * kept:
        raise JobError(
            f"config.json: num_experts_per_tok {active} exceeds the "
            f"{num_experts // groups * kept} experts of topk_group {kept}"
        )
    return active


def read_latent_attention(fields: Fields) -> tuple[MlaDims, RopeSpec]:
    """DeepSeek's widths of all heads, with YaRN's factor in the scale, and the angles."""
    rope_width = fields.even("qk_rope_head_dim")
    nope = fields.integer("qk_nope_head_dim", most=MAX_HEAD_WIDTH)
    rope, score_factor = read_rope(fields, rope_width)
    dims = MlaDims(
        heads=fields.integer("num_attention_heads"),
        nope=nope,
        rope=rope_width,
        value=fields.integer("v_head_dim", most=MAX_HEAD_WIDTH),
        latent=fields.integer("kv_lora_rank"),
        scale=(nope + rope_width) ** -0.5 * score_factor,
    )
    return dims, rope


def read_rope(
    fields: Fields, width: int, share: float = 1.0, default_theta: float = 10000.0
) -> tuple[RopeSpec, float]:
    """The angles, and the factor of YaRN's `mscale_all_dim` on scores' magnitude (1 without it).

    `rope_parameters` holds what `rope_scaling` and `rope_theta` hold in older files. `width` is
    what is rotated, `share` its part of a head, which the file may repeat and not contradict.
    """
    rope = _rope_fields(fields)
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    if theta <= 1:
        raise JobError(f"{fields.where}: rope_theta {theta:g} must exceed 1; correct the file")
    for place in (fields, rope):
        place.require("partial_rotary_factor", share)
    kind = _rope_kind(rope)
    if kind == "default":
        return RopeSpec(width=width, theta=theta), 1.0
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise JobError(f"{rope.where}: high_freq_factor must exceed low_freq_factor")
        spec = RopeSpec(
            width=width, theta=theta, kind=RopeKind.LLAMA3, factor=rope.number("factor"),
            original_positions=rope.integer("original_max_position_embeddings"),
            low_freq_factor=low, high_freq_factor=high,
        )  # fmt: skip
        return spec, 1.0
    if kind == "yarn":
        return _read_yarn(rope, width, theta)
    known = ", ".join(RopeKind)
    raise JobError(f"{rope.where}: rope type {shown(kind)} is not supported; known are {known}")


def _rope_fields(fields: Fields) -> Fields:
    """`rope_parameters`, or `rope_scaling` as older files call it; what is said twice must be said
    alike."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        raw, where = fields.raw.get(name) or {}, f"{fields.where}: {name}"
        if not isinstance(raw, Mapping):
            raise JobError(f"{where} must be an object, not {shown(raw)}")
        nested = [key for key, value in raw.items() if isinstance(value, Mapping)]
        if nested:
            raise JobError(f"{where} for {', '.join(nested)} alone are not supported")
        if raw:
            found.append(Fields(raw, where))
    said = [
        {key: value for key, value in each.raw.items() if key not in ("type", "rope_theta")}
        | {"rope_type": _rope_kind(each)}
        for each in found
    ]
    if len(said) == 2 and said[0] != said[1]:
        raise JobError(
            f"{fields.where}: rope_parameters and rope_scaling differ; keep the right one"
        )
    bases = [each.raw["rope_theta"] for each in (fields, *found) if each.raw.get("rope_theta")]
    if any(base != bases[0] for base in bases):
        raise JobError(
            f"{fields.where}: rope_theta is {' and '.join(map(shown, bases))}; keep the right one"
        )
    return found[0] if found else Fields({}, f"{fields.where}: rope_parameters")


def _rope_kind(rope: Fields) -> Any:
    """How angles are stretched, under its new name or its old one; a factor alone does not say."""
    kinds = [rope.raw[name] for name in ("rope_type", "type") if rope.raw.get(name) is not None]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise JobError(
            f"{rope.where}: rope_type {shown(kinds[0])} and type {shown(kinds[1])} differ; keep "
            f"the right one"
        )
    factors = [name for name in rope.raw if name == "factor" or name.endswith("_freq_factor")]
    if not kinds and factors:
        raise JobError(f"{rope.where} has {', '.join(factors)} but no rope_type; add it")
    return kinds[0] if kinds else "default"


def _read_yarn(rope: Fields, width: int, theta: float) -> tuple[RopeSpec, float]:
    """cos and sin carry m(mscale) / m(mscale_all_dim), scores m(mscale_all_dim)²."""
    factor = rope.number("factor")
    mscale, all_dim = (
        rope.number(name, 0.0) if rope.raw.get(name) else 0.0
        for name in ("mscale", "mscale_all_dim")
    )
    if mscale and all_dim:
        multiplier = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    else:
        multiplier = yarn_magnitude(factor, 1.0)
    spec = RopeSpec(
        width=width, theta=theta, kind=RopeKind.YARN, factor=factor,
        original_positions=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0), beta_slow=rope.number("beta_slow", 1.0),
        is_truncated=rope.flag("truncate", True),
        multiplier=rope.number("attention_factor", multiplier),
    )  # fmt: skip
    return spec, yarn_magnitude(factor, all_dim) ** 2 if all_dim else 1.0
