"""`quantization_config`: what is read, and what is refused by name."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from published import DEEPSEEK_R1, DEEPSEEK_V4_FLASH, MINIMAX_M2
from quantised import WAYS

from batchmla.errors import JobError
from batchmla.kernels.quant import Coding
from batchmla.weights.quant_config import Quantisation, read_quantisation

INT4 = WAYS["k2 int4"].config
MXFP4 = WAYS["k2 mxfp4"].config


def read(raw: dict[str, Any]) -> Quantisation:
    found = read_quantisation(raw)
    assert found is not None
    return found


def changed(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value replaced."""
    copied = deepcopy(raw)
    *parents, last = path.split(".")
    section = copied
    for name in parents:
        section = section[name]
    section[last] = value
    return copied


def test_plain_models_have_none() -> None:
    assert read_quantisation({"quantization_config": None, "text_config": {}}) is None


def test_published_configs_are_read() -> None:
    r1, v4 = read(DEEPSEEK_R1), read(DEEPSEEK_V4_FLASH)
    assert (r1.matrices.coding, r1.matrices.block_rows, r1.matrices.block_columns) == (
        Coding.E4M3, 128, 128,
    )  # fmt: skip
    assert r1.experts == r1.matrices and r1.matrices.scale_dtype == torch.float32
    assert v4.matrices.scale_dtype == torch.uint8
    assert (v4.experts.coding, v4.experts.block_rows, v4.experts.block_columns) == (
        Coding.E2M1, 1, 32,
    )  # fmt: skip
    assert read(INT4).matrices.coding is Coding.INT4
    assert read(MXFP4).matrices.coding is Coding.E2M1


def test_a_model_inside_another_has_its_own() -> None:
    assert read({"text_config": INT4}) == read(INT4)


@pytest.mark.parametrize(
    ("raw", "name", "expected"),
    [
        (MINIMAX_M2, "model.layers.0.block_sparse_moe.gate.weight", True),
        (MINIMAX_M2, "lm_head.weight", True),
        (MINIMAX_M2, "model.layers.0.block_sparse_moe.experts.0.w1.weight", False),
        (MINIMAX_M2, "model.layers.0.mlp.gate_proj.weight", False),
        (INT4, "model.layers.1.self_attn.o_proj.weight", True),
        (INT4, "model.layers.0.mlp.gate_proj.weight", True),
        (INT4, "model.layers.1.mlp.shared_experts.gate_proj.weight", True),
        (INT4, "model.layers.1.mlp.experts.3.gate_proj.weight", False),
        (INT4, "lm_head.weight", True),
    ],
)
def test_names_of_plain_modules(raw: dict[str, Any], name: str, expected: bool) -> None:
    assert read(raw).ignores(name) is expected


Q = "quantization_config"
W = f"{Q}.config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("raw", "path", "value", "message"),
    [
        (DEEPSEEK_R1, Q, {}, "names no quant_method"),
        (DEEPSEEK_R1, Q, "fp8", "names no quant_method"),
        *(
            (DEEPSEEK_R1, Q, {"quant_method": each}, f"quant_method {each} cannot be computed")
            for each in ("gptq", "awq", "bitsandbytes", "modelopt", "mxfp4", "nvfp4", "int8")
        ),
        (DEEPSEEK_R1, f"{Q}.fmt", "e5m2", 'fmt "e5m2" cannot be computed'),
        (DEEPSEEK_R1, f"{Q}.activation_scheme", "static", "activation_scheme"),
        (DEEPSEEK_R1, f"{Q}.weight_block_size", None, "weight_block_size must be"),
        (DEEPSEEK_R1, f"{Q}.weight_block_size", [128], "weight_block_size must be"),
        (DEEPSEEK_R1, f"{Q}.weight_block_size", [128, 0], "weight_block_size must be"),
        (DEEPSEEK_R1, f"{Q}.weight_block_size", [True, 128], "weight_block_size must be"),
        (DEEPSEEK_R1, f"{Q}.modules_to_not_convert", "gate", "must be a list of names"),
        (DEEPSEEK_R1, f"{Q}.scale_fmt", "int", "scale_fmt"),
        (DEEPSEEK_V4_FLASH, "expert_dtype", "nvfp4", 'expert_dtype "nvfp4"'),
        (INT4, f"{Q}.format", "float-quantized", 'format "float-quantized" cannot be computed'),
        (INT4, f"{Q}.format", "nvfp4-pack-quantized", "nvfp4-pack-quantized"),
        (INT4, f"{Q}.quantization_status", "frozen", "quantization_status"),
        (INT4, f"{Q}.kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
        (INT4, f"{Q}.config_groups", {}, "must hold one group"),
        (INT4, f"{Q}.ignore", ["re:("], "no regular expression"),
        (INT4, f"{Q}.config_groups.group_0.input_activations", {"num_bits": 8}, "input_activ"),
        (INT4, f"{W}.symmetric", False, "symmetric false cannot be computed"),
        (INT4, f"{W}.num_bits", 8, "num_bits 8 cannot be computed"),
        (INT4, f"{W}.actorder", "group", "actorder"),
        (INT4, f"{W}.strategy", "channel", "strategy"),
        (INT4, f"{W}.group_size", 12, "multiple of 8"),
        (MXFP4, f"{W}.group_size", 16, "group_size 16 cannot be computed"),
        (MXFP4, f"{W}.type", "int", 'type "int" cannot be computed'),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    raw: dict[str, Any], path: str, value: Any, message: str
) -> None:
    with pytest.raises(JobError) as caught:
        read_quantisation(changed(raw, path, value))
    text = str(caught.value)
    assert message in text and text.startswith("config.json") and "\n" not in text
    assert "use a copy in bfloat16" in text or "correct the file" in text or "names no" in text
