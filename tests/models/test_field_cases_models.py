"""Field cases of configs: the spellings of rope scaling, and the magnitude in the softmax scale."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepseek_float64 import one_layer_logits
from safetensors.torch import load_file
from steps import Row, run_chunks
from tiny import TINY, read_config, write_tiny

from batchmla import kernels
from batchmla.errors import JobError
from batchmla.kv.cache import make_cache
from batchmla.models import get_family
from batchmla.models.load import load_model
from batchmla.parallel import Par
from batchmla.placement import Placement

PAGE_TOKENS = 64
POSITION = 3000
# factor and magnitudes as published; few enough original positions that 3,000 lies far beyond
LONG = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 128,
}  # fmt: skip
DENSE = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "max_position_embeddings": 5120}


def logits(folder: Path, raw: dict[str, Any], ids: list[int], backend: str = "cpu") -> torch.Tensor:
    """float32 [T, V], in chunks of 512."""
    family = get_family(raw)
    model = load_model(
        folder, raw, Placement(), Par.single(), kernels.load(backend), torch.float32,
        torch.device("cpu"),
    )  # fmt: skip
    config = family.Config.from_hf(raw)
    layout = family.layout(config, "float32", Placement(), PAGE_TOKENS)
    num_pages = -(-len(ids) // PAGE_TOKENS)
    cache = make_cache(layout, num_pages, torch.device("cpu"), num_lanes=1)
    row = Row(ids, list(range(num_pages)))
    run_chunks(model, cache, [row], 512, PAGE_TOKENS)
    return torch.cat(row.logits)


def old_spelling(raw: dict[str, Any], word: str) -> dict[str, Any]:
    """The angles as older files say them: `word` names the kind."""
    rope = dict(raw["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    kept = {name: value for name, value in raw.items() if name != "rope_parameters"}
    return kept | {"rope_theta": theta, "rope_scaling": rope | {word: kind}}


@pytest.mark.parametrize("name", ["v3", "v2_lite", "k2", "v32", "llama", "qwen3"])
def test_fc_126_three_spellings_of_rope_scaling_give_the_same_logits(
    tmp_path: Path, name: str
) -> None:
    write_tiny(tmp_path, name)
    raw = read_config(tmp_path)
    assert raw["rope_parameters"]["rope_type"] != "default"
    spelled = [raw, old_spelling(raw, "rope_type"), old_spelling(raw, "type")]
    spelled.append(spelled[1] | {"rope_parameters": raw["rope_parameters"]})  # twice, but alike
    ids = random.Random(1).choices(range(256), k=60)
    first, *others = (logits(tmp_path, each, ids) for each in spelled)
    for other in others:
        assert torch.equal(first, other)
    plain = raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert (logits(tmp_path, plain, ids) - first).abs().max() > 0.01, "the scaling is switched off"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"factor": 40}}, "rope_scaling has factor but no rope_type; add it"),
        (
            {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 4}},
            'rope_scaling: rope_type "yarn" and type "linear" differ; keep the right one',
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4},
             "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_parameters and rope_scaling differ; keep the right one",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
            "rope_theta is 10000.0 and 50000.0; keep the right one",
        ),
        ({"rope_scaling": ["yarn"]}, 'rope_scaling must be an object, not ["yarn"]'),
        ({"rope_scaling": {"type": "Yarn", "factor": 4}}, 'rope type "Yarn" is not supported'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "v3"])
def test_fc_126_what_a_config_says_in_two_ways_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    architecture, fields = TINY[name]
    raw = {"architectures": [architecture], **fields}
    del raw["rope_parameters"]
    with pytest.raises(JobError) as caught:
        get_family(raw).Config.from_hf(raw | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("name", "magnitude"), [("v3", 1.0), ("k2", 1.0), ("v2_lite", 0.707), ("v2", 0.707)]
)
def test_fc_127_the_magnitude_is_in_the_softmax_scale(
    tmp_path: Path, name: str, magnitude: float, backend: str
) -> None:
    """Against the papers' formulas in float64, at the last of 3,001 positions and before."""
    yarn = LONG | {"mscale": magnitude, "mscale_all_dim": magnitude}
    write_tiny(tmp_path, name, rope_parameters=yarn, **DENSE)
    raw = read_config(tmp_path)
    last = POSITION if backend == "cpu" else 300  # the reference loops over positions
    ids = random.Random(name).choices(range(256), k=last + 1)
    rows = [0, 127, 128, last]
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {key: value.double().numpy() for key, value in stored.items()}
    expected = one_layer_logits(tensors, raw, yarn, ids, rows)
    found = logits(tmp_path, raw, ids, backend)[rows].double().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    without = one_layer_logits(tensors, raw, yarn, ids, rows, has_magnitude=False)
    assert np.abs(without - expected)[1:].max() > 0.01, "the test would not see it left out"
