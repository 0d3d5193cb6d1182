"""Whole tiny checkpoints, quantised as published, each beside its values in float32."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quantise import Made, block_fp8, group_fp4, group_int4
from safetensors.torch import load_file, save_file
from tiny import read_config, write_tiny

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCK = [48, 32]  # small and not square; partial blocks at edges, and compiled kernels serve it
EXPERTS = r".*\.experts\.\d+\..*"
# what the published checkpoints leave plain, by name
PLAIN = r".*(embed_tokens|embed|lm_head|head|norm|gate|weights_proj|hc_\w+)\.weight"
V4_PLAIN = r".*compressor.*"


@dataclass(frozen=True)
class Way:
    """A tiny model, what its config says of it, and what is made of each matrix."""

    model: str
    config: dict[str, Any]
    make: Callable[[str, torch.Tensor], Made | None]


def _is_linear(name: str, value: torch.Tensor) -> bool:
    return value.dim() == 2 and name.endswith(".weight") and re.fullmatch(PLAIN, name) is None


def _fp8(name: str, weight: torch.Tensor) -> Made | None:
    return block_fp8(weight, (BLOCK[0], BLOCK[1])) if _is_linear(name, weight) else None


def _v4(name: str, weight: torch.Tensor) -> Made | None:
    if not _is_linear(name, weight) or re.fullmatch(V4_PLAIN, name):
        return None
    if re.fullmatch(EXPERTS, name):
        return group_fp4(weight)
    return block_fp8(weight, (BLOCK[0], BLOCK[1]), ending="scale", is_e8m0=True)


def _v4_base(name: str, weight: torch.Tensor) -> Made | None:
    if not _is_linear(name, weight) or re.fullmatch(V4_PLAIN, name):
        return None
    is_expert = re.fullmatch(EXPERTS, name) is not None
    return block_fp8(weight, (BLOCK[0], BLOCK[1]), ending="scale", is_e8m0=not is_expert)


def _int4(name: str, weight: torch.Tensor) -> Made | None:
    return group_int4(weight) if re.fullmatch(EXPERTS, name) else None


def _mxfp4(name: str, weight: torch.Tensor) -> Made | None:
    return group_fp4(weight, is_compressed=True) if re.fullmatch(EXPERTS, name) else None


def _compressed(form: str, kind: str) -> dict[str, Any]:
    """As Kimi-K2's thinking models say it."""
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
        "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
        "symmetric": True, "type": kind,
    }  # fmt: skip
    group = {
        "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": weights,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": [
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip


def _block(**more: Any) -> dict[str, Any]:
    return {"quantization_config": FP8 | {"weight_block_size": BLOCK} | more}


WAYS = {
    "v3 fp8": Way("v3", _block(), _fp8),
    "v32 fp8": Way("v32", _block(scale_fmt="ue8m0"), _fp8),
    "m2 fp8": Way(
        "minimax_m2",
        _block(modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"]),
        _fp8,
    ),
    "m3 fp8": Way("minimax_m3", _block(), _fp8),
    "qwen3 fp8": Way("qwen3", _block(), _fp8),
    "v4 fp8 fp4": Way("v4", _block(scale_fmt="ue8m0") | {"expert_dtype": "fp4"}, _v4),
    "v4 base": Way("v4", _block(scale_fmt="ue8m0") | {"expert_dtype": "fp8"}, _v4_base),
    "k2 int4": Way("k2", {"quantization_config": _compressed("pack-quantized", "int")}, _int4),
    "k2 mxfp4": Way(
        "k2", {"quantization_config": _compressed("mxfp4-pack-quantized", "float")}, _mxfp4
    ),
    "v3 wide fp8": Way("v3_wide", _block(), _fp8),
}


@dataclass(frozen=True)
class Saved:
    """`original`: before it was quantised; `expanded`: the quantised values in float32."""

    quantised: Path
    expanded: Path
    original: Path


def write_quantised(folder: Path, way: Way, **changes: Any) -> Saved:
    """Saves the model three times."""
    saved = Saved(*(folder / name for name in ("quantised", "expanded", "original")))
    write_tiny(saved.original, way.model, **changes)
    state = load_file(saved.original / "model.safetensors")
    raw = read_config(saved.original)
    tensors, values = {}, {}
    for name, weight in state.items():
        made = way.make(name, weight)
        if made is None:
            tensors[name] = values[name] = weight
            continue
        base = name.removesuffix("weight")
        tensors |= {base + ending: tensor.contiguous() for ending, tensor in made.tensors.items()}
        values[name] = torch.from_numpy(made.values).float()
    assert len(tensors) > len(state), f"{way.model}: nothing is quantised"
    save(saved.quantised, tensors, raw | way.config)
    save(saved.expanded, values, raw)
    return saved


def save(folder: Path, tensors: dict[str, torch.Tensor], raw: dict[str, Any]) -> None:
    """Weights and config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
