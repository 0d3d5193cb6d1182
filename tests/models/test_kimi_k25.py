"""The text of Kimi-K2.5 is read out of the whole model, and Kimi-K3 is refused."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from choices import Case
from compare import assert_logits
from published import KIMI_K2
from safetensors.torch import load_file, save_file
from steps import Row, run_chunks
from tiny import K2, oracle_logits, randomise, read_config

from batchmla import kernels
from batchmla.engine.describe import describe
from batchmla.errors import JobError
from batchmla.models import get_family
from batchmla.models.deepseek_v3 import K25
from batchmla.placement import Placement
from batchmla.weights.rules import expand

PAGE_TOKENS = 16
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A whole model, its vision part and a tiny K2, by published names: what transformers saves
    calls text layers as it calls those of the vision part."""
    config = transformers.Kimi_K25Config(
        text_config=deepcopy(K2) | {"model_type": "deepseek_v3"}, vision_config=VISION,
        projection_hidden_size=32, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    oracle = transformers.Kimi_K25ForConditionalGeneration(config).eval().float()
    randomise(oracle, 0)
    folder: Path = tmp_path_factory.mktemp("k25")
    oracle.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    wrong, right = (f"language_model.model.{word}." for word in ("blocks", "layers"))
    named = {name.replace(wrong, right): value for name, value in saved.items()}
    save_file(named, folder / "model.safetensors")
    return Case(folder, oracle)


@pytest.mark.parametrize("name", K25)
def test_text_logits_equal_transformers(
    case: Case, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = read_config(case.folder) | {"architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(case.folder / "model.safetensors")
    named = replace(case, folder=tmp_path)
    with caplog.at_level("INFO"):
        model = named.model(kernels.load("cpu"))
    assert sum("images and videos are not read" in line for line in caplog.messages) == 1
    ids = torch.randint(2, 256, (45,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [Row(ids, [3, 1, 2]), Row(ids[:20], [7, 5])]
    run_chunks(model, named.cache("float32"), rows, [7, 64], PAGE_TOKENS)
    for row in rows:
        assert_logits("text", torch.cat(row.logits), oracle_logits(case.oracle, row.ids))


def test_published_text_is_k2(tmp_path: Path) -> None:
    """The same parameters, cache and tensors as Kimi-K2, each behind the whole model's prefix."""
    raw = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "text_config": {**KIMI_K2, "model_type": "kimi_k2"}, "vision_config": {},
    }  # fmt: skip
    facts = []
    for index, each in enumerate((raw, KIMI_K2)):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(each))
        facts.append(describe(folder))
    k25, k2 = facts
    assert (k25.total_params, k25.active_params) == (k2.total_params, k2.active_params)
    assert k25.layout("bfloat16") == k2.layout("bfloat16")
    assert k25.quantization == k2.quantization
    names = [
        {piece.source for piece in expand(get_family(each.raw).rules(each.config), Placement())}
        for each in facts
    ]
    assert names[0] == {f"language_model.{name}" for name in names[1]}


def test_a_whole_model_without_its_text_is_refused() -> None:
    raw: dict[str, Any] = {"architectures": [K25[0]], "text_config": None}
    with pytest.raises(JobError, match=r"text_config must be an object .* not null"):
        get_family(raw).Config.from_hf(raw)


@pytest.mark.parametrize("name", ["KimiK3ForConditionalGeneration", "KimiK3ForCausalLM"])
def test_k3_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(JobError, match=rf"{name} .*: Kimi-K3 cannot be run: .* attention resid"):
        get_family({"architectures": [name]})
