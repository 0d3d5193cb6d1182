"""What `inspect` says of published models from their config alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES
from published import (
    DEEPSEEK_R1,
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    DEEPSEEK_V32,
    DISTILL_LLAMA_8B,
    DISTILL_QWEN_7B,
    KIMI_K2,
    MINIMAX_M2,
    MINIMAX_M3,
    QWEN3_30B_A3B,
)

from batchmla.errors import JobError
from batchmla.jobs.inspect import inspect_model, print_inspect


def folder_of(path: Path, raw: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(raw))
    return str(path)


def test_r1_takes_the_published_bytes(tmp_path: Path) -> None:
    facts = inspect_model(folder_of(tmp_path, DEEPSEEK_R1))
    assert facts["kv_bytes_per_token"] == 70_272
    assert facts["kv_bytes_at"]["32768"] == 2_302_672_896
    assert facts["kv_bytes_per_token_per_layer"] == [1152] * 61
    assert facts["attention"] == {"mla": 61}
    assert facts["kv_bytes_per_token_mha"] == 61 * 128 * (192 + 128) * 2
    assert facts["kv_bytes_per_token_gqa8"] == 61 * 8 * (192 + 128) * 2
    assert facts["quantization"] == "fp8"
    assert 1.003 < facts["weights_bytes"] / facts["parameters"] < 1.015
    assert 670.5e9 < facts["parameters"] < 671.5e9  # "671B" without the MTP layer
    assert 36.5e9 < facts["active_parameters"] < 38e9  # "37B activated"


def test_weights_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    flash = inspect_model(folder_of(tmp_path, DEEPSEEK_V4_FLASH))
    assert 0.53 < flash["weights_bytes"] / flash["parameters"] < 0.57  # experts take 4.25 bits
    other = DEEPSEEK_R1 | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    unread = inspect_model(folder_of(tmp_path, other))
    assert unread["quantization"] == "gptq" and unread["weights_bytes"] is None
    assert any("quant_method gptq cannot be computed" in note for note in unread["notes"])


def test_lengths_stop_at_the_models_own(tmp_path: Path) -> None:
    facts = inspect_model(folder_of(tmp_path, DEEPSEEK_R1))
    assert list(facts["kv_bytes_at"]) == ["4096", "32768", "131072", "163840"]


def test_distill_llama_keeps_eight_heads(tmp_path: Path) -> None:
    facts = inspect_model(folder_of(tmp_path, DISTILL_LLAMA_8B))
    assert facts["kv_bytes_per_token"] == facts["kv_bytes_per_token_gqa8"] == 131_072
    assert facts["parameters"] == 8_030_261_248


# config, attention, KV bytes a token in bfloat16, parameters, active ones in billions, MHA bytes a
# token and layer; parameters are those of the published checkpoints without scales
PUBLISHED = [
    (DEEPSEEK_V2_LITE, {"mla": 27}, 31_104, 15_706_484_224, 2.4, 16 * 320 * 2),
    (DEEPSEEK_V2, {"mla": 60}, 69_120, 235_741_434_880, 21, 128 * 320 * 2),
    (KIMI_K2, {"mla": 61}, 70_272, 1_026_408_232_448, 32, 64 * 320 * 2),
    (DISTILL_QWEN_7B, {"gqa": 28}, 57_344, 7_615_616_512, 7.6, 2 * 28 * 128 * 2),
    (QWEN3_30B_A3B, {"gqa": 48}, 98_304, 30_532_122_624, 3.3, 2 * 32 * 128 * 2),
    (MINIMAX_M2, {"gqa": 62}, 253_952, 228_689_764_864, 10, 2 * 48 * 128 * 2),
]


@pytest.mark.parametrize(
    ("raw", "attention", "token_bytes", "parameters", "active", "mha"),
    PUBLISHED,
    ids=["v2_lite", "v2", "k2", "distill_qwen", "qwen3_moe", "minimax_m2"],
)
def test_published_models_take_the_published_bytes(
    tmp_path: Path,
    raw: dict[str, Any],
    attention: dict[str, int],
    token_bytes: int,
    parameters: int,
    active: float,
    mha: int,
) -> None:
    facts = inspect_model(folder_of(tmp_path, raw))
    layers = raw["num_hidden_layers"]
    assert facts["attention"] == attention
    assert facts["kv_dtype"] == "bfloat16"
    assert facts["kv_bytes_per_token"] == token_bytes
    assert facts["kv_bytes_per_token_per_layer"] == [token_bytes // layers] * layers
    assert facts["kv_bytes_at"]["32768"] == token_bytes * 32_768
    assert facts["kv_bytes_per_token_mha"] == layers * mha
    assert facts["parameters"] == parameters
    assert active * 1e9 < facts["active_parameters"] < (active * 1.12) * 1e9
    assert facts["quantization"] == raw.get("quantization_config", {}).get("quant_method")


def test_v32_takes_the_published_bytes_in_every_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = inspect_model(folder_of(tmp_path, DEEPSEEK_V32))
    assert facts["attention"] == {"dsa": 61} and facts["attention_by_layer"] == ["dsa"] * 61
    layouts = facts["kv_layouts"]
    tokens = {name: each["bytes_per_token"] for name, each in layouts.items()}
    assert tokens == {"bfloat16": 85_888, "fp8_index": 78_324, "fp8": 48_068}
    assert layouts["fp8"]["bytes_at"]["32768"] == 1_575_092_224
    for name, most in (("bfloat16", 13.11), ("fp8_index", 11.95), ("fp8", 7.33)):
        assert layouts[name]["bytes_at"]["163840"] == tokens[name] * 163_840
        assert round(tokens[name] * 163_840 / 2**30, 2) == most
    assert facts["kv_bytes_per_token"] == 85_888
    # V3's, and in every layer the indexer's four matrices and its norm
    index = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128
    assert facts["parameters"] == 671_026_419_200 + 61 * index
    print_inspect(facts)
    shown = capsys.readouterr().out
    assert "61 x dsa" in shown and "48,068" in shown and "1,575,092,224" in shown


def test_m3_takes_the_published_bytes_and_names_its_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = inspect_model(folder_of(tmp_path, MINIMAX_M3))
    assert facts["attention"] == {"gqa": 3, "block_sparse": 57}
    assert facts["attention_by_layer"] == ["gqa"] * 3 + ["block_sparse"] * 57
    assert facts["kv_bytes_per_token"] == 122_880 + 14_592
    assert facts["kv_bytes_per_token_per_layer"] == [2048] * 3 + [2304] * 57
    assert facts["kv_bytes_at"]["32768"] == 137_472 * 32_768
    assert facts["kv_bytes_per_token_mha"] == 60 * 2 * 64 * 128 * 2
    attention = 6144 * 128 * (64 + 4 + 4 + 64) + 2 * 128 + 2 * 6144
    index = 6144 * 128 * (4 + 1) + 2 * 128
    routed = 3 * 6144 * 3072 * (128 + 1) + 128 * 6144 + 128
    dense, outer = 3 * 6144 * 12288, 2 * 200_064 * 6144 + 6144
    assert facts["parameters"] == 60 * attention + 57 * (index + routed) + 3 * dense + outer
    unused = 57 * 3 * 6144 * 3072 * (128 - 4)
    assert facts["active_parameters"] == facts["parameters"] - unused
    print_inspect(facts)
    shown = capsys.readouterr().out
    assert "3 x gqa, 57 x block_sparse" in shown and "137,472" in shown


# layout, bytes a further token takes, bytes of the windows, MiB at 4k, 32k, 128k and 1M tokens
V4_TOTALS = {
    "flash": (
        ("fp8", 3850.25, 3_214_336, (18.1, 123.4, 484.3, 3853.3)),
        ("fp8_fp4", 3514.25, 3_214_336, (16.8, 112.9, 442.3, 3517.3)),
        ("bfloat16", 6880, 5_636_096, (32.3, 220.4, 865.4, 6885.4)),
    ),
    "pro": (
        ("fp8", 5511.4375, 4_559_872, (25.9, 176.6, 693.3, 5515.8)),
        ("fp8_fp4", 5031.4375, 4_559_872, (24.0, 161.6, 633.3, 5035.8)),
        ("bfloat16", 9848, 7_995_392, (46.1, 315.4, 1238.6, 9855.6)),
    ),
}
V4_FACTS = {
    "flash": (DEEPSEEK_V4_FLASH, {"swa": 2, "csa": 21, "hca": 20}, 12_206_080, 284, 13),
    "pro": (DEEPSEEK_V4_PRO, {"csa": 30, "hca": 31}, 18_710_528, 1600, 49),
}


@pytest.mark.parametrize("name", V4_TOTALS)
def test_v4_takes_the_published_bytes_in_every_layout(tmp_path: Path, name: str) -> None:
    raw, kinds, state_bytes, billions, active = V4_FACTS[name]
    facts = inspect_model(folder_of(tmp_path, raw))
    assert facts["attention"] == kinds and len(facts["attention_by_layer"]) == sum(kinds.values())
    words = {0: "swa", 4: "csa", 128: "hca"}
    ratios = raw["compress_ratios"][: raw["num_hidden_layers"]]
    assert facts["attention_by_layer"] == [words[ratio] for ratio in ratios]
    for layout, slope, window_bytes, sizes in V4_TOTALS[name]:
        found = facts["kv_layouts"][layout]
        assert (found["bytes_per_token"], found["state_bytes"]) == (slope, state_bytes)
        row = 1024 if layout == "bfloat16" else 584
        index = {"bfloat16": 256, "fp8": 132, "fp8_fp4": 68}[layout]
        csa, hca = kinds["csa"], kinds["hca"]
        for length, mib in zip((4096, 32768, 131072, 1048576), sizes, strict=True):
            entries = csa * (length // 4) * (row + index) + hca * (length // 128) * row
            assert found["bytes_at"][str(length)] == window_bytes + entries
            assert abs((window_bytes + entries) / 2**20 - mib) <= 0.05
    assert facts["kv_bytes_at"]["4096"] == state_bytes + found["bytes_at"]["4096"]
    assert abs(facts["parameters"] / 1e9 - billions) < 0.02 * billions
    assert active * 1e9 < facts["active_parameters"] < (active * 1.12) * 1e9


def test_a_bare_config_says_what_is_not_known(tmp_path: Path) -> None:
    facts = inspect_model(folder_of(tmp_path, DEEPSEEK_R1))
    assert facts["reasoning_markers"] is None
    assert any("tokenizer" in note for note in facts["notes"])


def test_builtin_model_has_markers_and_a_template() -> None:
    facts = inspect_model("builtin:tally")
    assert facts["reasoning_markers"] == ["<think>", "</think>"]
    assert facts["supports_budget"] is True
    assert facts["chat_template"] is not None


def test_print_shows_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_inspect(inspect_model(folder_of(tmp_path, DEEPSEEK_R1)))
    shown = capsys.readouterr().out
    assert "70,272" in shown and "2,302,672,896" in shown


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"architectures": ["FooForCausalLM"]}, ("FooForCausalLM", "DeepseekV3ForCausalLM")),
        ({}, ("architectures",)),
        ({**DEEPSEEK_R1, "scoring_func": "softmax"}, ("scoring_func", "softmax")),
    ],
)
def test_unknown_models_are_refused_by_name(
    tmp_path: Path, raw: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(JobError) as caught:
        inspect_model(folder_of(tmp_path, raw))
    for word in words:
        assert word in str(caught.value)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"config\.json"):
        inspect_model(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "config", "parser", "encoder"),
    [
        ("deepseek_r1", DEEPSEEK_R1, "deepseek_r1", None),
        ("deepseek_v31", DEEPSEEK_R1, "deepseek_v3", None),
        ("deepseek_v32", DEEPSEEK_V32, "deepseek_v32", "deepseek_v32"),
        ("kimi_k2", KIMI_K2, "kimi_k2", None),
        ("minimax_m2", MINIMAX_M2, "minimax_m2", None),
        ("qwen3", QWEN3_30B_A3B, "qwen3", None),
    ],
)
def test_the_chat_format_is_that_of_the_model(
    tmp_path: Path,
    family: str,
    config: dict[str, Any],
    parser: str,
    encoder: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = inspect_model(folder_of(FAMILIES[family].write(tmp_path), config))
    assert facts["reasoning_parser"] == parser and facts["supports_tool_calls"] is True
    assert facts["reasoning_markers"] == ["<think>", "</think>"]
    assert facts["chat_encoder"] == encoder
    assert (facts["chat_template"] is None) == (encoder is not None)
    print_inspect(facts)
    said = capsys.readouterr().out
    assert encoder is None or f"none needed: prompts are written as {encoder}" in said
