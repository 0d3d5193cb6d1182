"""What `inspect` says of published models from their config alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from published import DEEPSEEK_R1, DISTILL_LLAMA_8B

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
    assert 670.5e9 < facts["parameters"] < 671.5e9  # "671B" without the MTP layer
    assert 36.5e9 < facts["active_parameters"] < 38e9  # "37B activated"


def test_lengths_stop_at_the_models_own(tmp_path: Path) -> None:
    facts = inspect_model(folder_of(tmp_path, DEEPSEEK_R1))
    assert list(facts["kv_bytes_at"]) == ["4096", "32768", "131072", "163840"]


def test_distill_llama_keeps_eight_heads(tmp_path: Path) -> None:
    facts = inspect_model(folder_of(tmp_path, DISTILL_LLAMA_8B))
    assert facts["kv_bytes_per_token"] == facts["kv_bytes_per_token_gqa8"] == 131_072
    assert facts["parameters"] == 8_030_261_248


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
