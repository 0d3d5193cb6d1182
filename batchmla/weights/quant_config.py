"""What a `config.json` says of quantised weights; what cannot be computed is refused by name.

Two methods are read: `fp8` (e4m3 with a scale a block, and DeepSeek-V4's e2m1 experts) and
`compressed-tensors` (int4 or e2m1 with a scale a group of columns).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch

from batchmla.errors import JobError
from batchmla.kernels.quant import Coding

FP8, COMPRESSED = "fp8", "compressed-tensors"
WAY_OUT = "use a copy in bfloat16, in fp8 with blocks, or in int4 or mxfp4 of compressed-tensors"
E2M1_GROUP = 32  # columns that share a scale, in both formats
PATTERN = "re:"  # what compressed-tensors puts before a regular expression


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A coding, and the block of rows and columns that shares a scale."""

    coding: Coding
    block_rows: int
    block_columns: int
    scale_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """`matrices` are of this form, routed experts of that of `experts`, where they have another.

    Modules in `ignored` are plain: names, or parts of names, or with "re:" expressions.
    """

    method: str
    matrices: Form
    experts: Form
    ignored: tuple[str, ...]

    def ignores(self, name: str) -> bool:
        """Whether the tensor `name` belongs to a module that is named as plain."""
        module = name.rpartition(".")[0]
        return any(_names(entry, module) for entry in self.ignored)


def _names(entry: str, module: str) -> bool:
    """An expression matches from the start; a name stands for whole words between dots."""
    if entry.startswith(PATTERN):
        return re.match(entry.removeprefix(PATTERN), module) is not None
    return f".{entry}." in f".{module}."


def read_quantisation(raw: Mapping[str, Any]) -> Quantisation | None:
    """Of a whole `config.json`, a model inside another included; None: weights are plain. Raises
    `JobError` for what cannot be computed."""
    found = _find(raw)
    if found is None:
        return None
    value, owner = found
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    if not isinstance(method, str):
        raise JobError(f"config.json: quantization_config names no quant_method: {_shown(value)}")
    if method == FP8:
        return _read_fp8(value, owner)
    if method == COMPRESSED:
        return _read_compressed(value)
    raise JobError(
        f"config.json: quantization_config: the quant_method {method} cannot be computed; {WAY_OUT}"
    )


def _find(raw: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]] | None:
    """The section and the object that holds it."""
    text = raw.get("text_config")
    for owner in (raw, text if isinstance(text, Mapping) else {}):
        if owner.get("quantization_config") is not None:
            return owner["quantization_config"], owner
    return None


def _require(where: str, value: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """An absent field means the first of `allowed`."""
    given = value.get(name, allowed[0])
    if not any(given == each and type(given) is type(each) for each in allowed):
        listed = " or ".join(_shown(each) for each in allowed)
        raise JobError(
            f"config.json: {where}: {name} {_shown(given)} cannot be computed, only {listed}; "
            f"{WAY_OUT}"
        )


def _read_fp8(value: Mapping[str, Any], owner: Mapping[str, Any]) -> Quantisation:
    where = "quantization_config"
    _require(where, value, "fmt", "e4m3", "float8_e4m3fn", None)
    _require(where, value, "activation_scheme", "dynamic", None)
    _require(where, value, "scale_fmt", None, "ue8m0", "float")
    _require("config", owner, "expert_dtype", None, "fp4", "fp8")
    block = value.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_count, block)):
        raise JobError(
            f"config.json: {where}: weight_block_size must be two positive integers, not "
            f"{_shown(block)}: fp8 weights with one scale each cannot be computed; {WAY_OUT}"
        )
    experts = Form(
        coding=Coding.E4M3,
        block_rows=block[0],
        block_columns=block[1],
        scale_dtype=torch.float32,
    )
    given = owner.get("expert_dtype")  # only of models whose other scales are powers of two
    return Quantisation(
        method=FP8,
        matrices=experts if given is None else replace(experts, scale_dtype=torch.uint8),
        experts=_e2m1() if given == "fp4" else experts,
        ignored=_read_names(value, "modules_to_not_convert"),
    )


def _e2m1() -> Form:
    return Form(coding=Coding.E2M1, block_rows=1, block_columns=E2M1_GROUP, scale_dtype=torch.uint8)


def _read_compressed(value: Mapping[str, Any]) -> Quantisation:
    where = "quantization_config"
    _require(where, value, "format", "pack-quantized", "mxfp4-pack-quantized")
    _require(where, value, "quantization_status", "compressed")
    _require(where, value, "kv_cache_scheme", None)
    groups = value.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise JobError(
            f"config.json: {where}: config_groups must hold one group, not {_shown(groups)}; "
            f"{WAY_OUT}"
        )
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise JobError(f"config.json: {where}: config_groups says nothing of weights; {WAY_OUT}")
    for name in ("input_activations", "output_activations"):
        _require(f"{where}: config_groups", group, name, None)
    is_float = value.get("format") == "mxfp4-pack-quantized"
    form = _e2m1() if is_float else _read_int4(weights)
    where = f"{where}: weights"
    _require(where, weights, "type", "float" if is_float else "int")
    _require(where, weights, "num_bits", 4)
    _require(where, weights, "strategy", "group")
    _require(where, weights, "group_size", form.block_columns)
    _require(where, weights, "symmetric", True)
    _require(where, weights, "dynamic", False)
    _require(where, weights, "actorder", None)
    return Quantisation(
        method=COMPRESSED, matrices=form, experts=form, ignored=_read_names(value, "ignore")
    )


def _read_int4(weights: Mapping[str, Any]) -> Form:
    """Groups of whole words, eight values each."""
    size = weights.get("group_size")
    if not _is_count(size) or size % 8:
        raise JobError(
            f"config.json: quantization_config: weights: group_size must be a positive multiple of "
            f"8, not {_shown(size)}; {WAY_OUT}"
        )
    return Form(coding=Coding.INT4, block_rows=1, block_columns=size, scale_dtype=torch.bfloat16)


def _read_names(value: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Names and expressions, each of which must compile."""
    names = value.get(field)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise JobError(
            f"config.json: quantization_config: {field} must be a list of names, not "
            f"{_shown(names)}; correct the file"
        )
    for name in names:
        try:
            re.compile(name.removeprefix(PATTERN) if name.startswith(PATTERN) else "")
        except re.error as error:
            raise JobError(
                f"config.json: quantization_config: {field} holds {_shown(name)}, which is no "
                f"regular expression ({error}); correct the file"
            ) from error
    return tuple(names)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
