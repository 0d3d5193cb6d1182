"""Kimi-Linear at the edges of its convolution and blocks: logits equal transformers'."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import NUM_LANES, NUM_PAGES, PAGE_TOKENS, Case, Watched, run_watched
from compare import assert_logits
from published import KIMI_LINEAR as PUBLISHED
from safetensors.torch import load_file, save_file
from steps import Row, run_chunks
from tiny import KIMI_LINEAR, TINY, oracle_logits, read_config

from batchmla import kernels
from batchmla.errors import JobError
from batchmla.jobs.inspect import inspect_model
from batchmla.models import get_family
from batchmla.models.kimi_linear import Config
from batchmla.placement import Placement
from batchmla.weights.rules import expand

# a convolution of 4 tokens, blocks of 64
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 200)
ONE_STEP = [1000] * len(LENGTHS)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.make(tmp_path_factory.mktemp("kimi_linear"), "kimi_linear")


@pytest.fixture(scope="module")
def expected(case: Case) -> list[torch.Tensor]:
    return [oracle_logits(case.oracle, row.ids) for row in make_rows(LENGTHS)]


def make_rows(lengths: Sequence[int]) -> list[Row]:
    """The same prompts and shuffled places every time."""
    source = random.Random(4)
    pool, lanes = list(range(NUM_PAGES)), list(range(NUM_LANES))
    source.shuffle(pool)
    source.shuffle(lanes)
    return [
        Row(
            [source.randrange(256) for _ in range(length)],
            [pool.pop() for _ in range(-(-length // PAGE_TOKENS))],
            lane=lanes.pop(),
        )
        for length in lengths
    ]


@pytest.mark.parametrize("sizes", [[1] * 9, [7] * 9, [64] * 9, ONE_STEP,
                                   [1, 2, 1, 3, 4, 1, 13, 64, 29]],
                         ids=["1", "7", "64", "whole", "mixed"])  # fmt: skip
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_logits_at_the_edges(
    case: Case, expected: list[torch.Tensor], sizes: list[int], backend: str
) -> None:
    """Lanes hold no numbers before a sequence comes to them, which it must not read."""
    cache, rows = case.cache("float32"), make_rows(LENGTHS)
    for layer in cache:
        for name in ("conv", "state"):
            if name in layer:
                layer[name].fill_(torch.nan)
    run_chunks(case.model(kernels.load(backend)), cache, rows, sizes, PAGE_TOKENS)
    for row, want in zip(rows, expected, strict=True):
        assert_logits(f"{len(row.ids)} tokens", torch.cat(row.logits), want)


def test_a_copied_lane_goes_on_as_the_first_one(case: Case, expected: list[torch.Tensor]) -> None:
    """What a snapshot at a page border is: lane and pages of the first 64 tokens, kept aside."""
    cache, model = case.cache("float32"), case.model(kernels.load("cpu"))
    whole = make_rows(LENGTHS)[-1]
    first = Row(whole.ids[:64], whole.pages, lane=3)
    run_chunks(model, cache, [first], 64, PAGE_TOKENS)
    for layer in cache:
        for name in ("conv", "state"):
            if name in layer:
                layer[name][9] = layer[name][3]
    other = Row(whole.ids[:70], whole.pages, lane=3, computed=64)
    run_chunks(model, cache, [other], 1, PAGE_TOKENS)
    later = Row(whole.ids, whole.pages, lane=9, computed=64)
    run_chunks(model, cache, [later], 50, PAGE_TOKENS)
    assert_logits("later", torch.cat(later.logits), expected[-1][64:])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8"])
def test_exact_mode_gives_the_same_bits_in_every_batch(case: Case, kv_dtype: str) -> None:
    dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
    watched = Watched(kernels.load("cpu", exact=True))
    model, lengths = case.model(watched.ops, dtype), (1, 4, 9, 65, 97)
    runs = []
    for sizes in ([1000] * 5, [7, 1, 64, 5, 13], [1, 2, 3, 64, 1]):
        rows = make_rows(lengths)
        found = run_watched(case, model, watched, case.cache(kv_dtype), rows, sizes, is_exact=True)
        runs.append(([torch.cat(row.logits) for row in rows], found))
    alone, cache = [], case.cache(kv_dtype)
    for row in make_rows(lengths):
        run_watched(case, model, watched, cache, [row], [33], is_exact=True)
        alone.append(torch.cat(row.logits))
    for logits, found in runs[1:]:
        assert found == runs[0][1]
        assert all(map(torch.equal, logits, runs[0][0]))
    assert all(map(torch.equal, alone, runs[0][0]))


def publish(case: Case, folder: Path) -> None:
    """The checkpoint by the names of the published one, which transformers writes otherwise."""
    raw = read_config(case.folder)
    kinds = raw.pop("layer_types")
    raw["first_k_dense_replace"] = raw.pop("mlp_layer_types").count("dense")
    numbered = list(enumerate(kinds, start=1))
    raw["linear_attn_config"] = {
        "full_attn_layers": [at for at, kind in numbered if kind == "full_attention"],
        "kda_layers": [at for at, kind in numbered if kind == "linear_attention"],
        "head_dim": raw.pop("linear_head_dim"), "num_heads": raw.pop("linear_num_heads"),
        "short_conv_kernel_size": raw.pop("linear_conv_kernel_dim"),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(case.folder / "model.safetensors")
    dense = "model.layers.0.block_sparse_moe."
    named = {name.replace(dense, "model.layers.0.mlp."): value for name, value in tensors.items()}
    assert named.keys() != tensors.keys()
    save_file(named, folder / "model.safetensors")


def test_published_names_load_alike(case: Case, tmp_path: Path) -> None:
    publish(case, tmp_path)
    logits = []
    for each in (case, Case(tmp_path, case.oracle)):
        rows = make_rows((30,))
        run_chunks(each.model(kernels.load("cpu")), each.cache("float32"), rows, 30, PAGE_TOKENS)
        logits.append(rows[0].logits[0])
    assert torch.equal(*logits)


def test_published_tensors_have_their_places() -> None:
    rules = get_family(PUBLISHED).rules(Config.from_hf(PUBLISHED))
    pieces = {piece.source: piece.shape for piece in expand(rules, Placement())}
    layer, experts = "model.layers.0.self_attn", "model.layers.26.block_sparse_moe"
    shapes = {
        f"{layer}.q_conv1d.weight": (4096, 1, 4), f"{layer}.A_log": (1, 1, 32, 1),
        f"{layer}.dt_bias": (4096,), f"{layer}.f_a_proj.weight": (128, 2304),
        f"{layer}.g_b_proj.weight": (4096, 128), f"{layer}.b_proj.weight": (32, 2304),
        f"{layer}.o_norm.weight": (128,), "model.layers.0.mlp.up_proj.weight": (9216, 2304),
        "model.layers.3.self_attn.q_proj.weight": (32 * 192, 2304),
        "model.layers.26.self_attn.kv_a_proj_with_mqa.weight": (576, 2304),
        f"{experts}.experts.255.w2.weight": (2304, 1024),
        f"{experts}.gate.e_score_correction_bias": (256,),
        f"{experts}.shared_experts.gate_proj.weight": (1024, 2304),
    }  # fmt: skip
    assert {name: pieces.get(name) for name in shapes} == shapes
    assert "model.layers.3.self_attn.A_log" not in pieces


def test_published_model_takes_the_published_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    facts = inspect_model(str(tmp_path))
    assert facts["attention"] == {"kda": 20, "mla": 7}
    assert [at for at, kind in enumerate(facts["attention_by_layer"], 1) if kind == "mla"] == [
        4, 8, 12, 16, 20, 24, 27,
    ]  # fmt: skip
    assert facts["kv_bytes_per_token"] == 8_064
    constant = 41_943_040 + 1_474_560
    assert facts["kv_layouts"]["bfloat16"]["state_bytes"] == constant
    for length in (4096, 32768, 131072, 1048576):
        assert facts["kv_bytes_at"][str(length)] == constant + 8_064 * length
    assert abs(facts["parameters"] / 1e9 - 48) < 1.5
    assert 2.5e9 < facts["active_parameters"] < 3.5e9


def test_published_scale_counts_what_others_rotate() -> None:
    config = Config.from_hf(PUBLISHED)
    assert config.latent.scale == pytest.approx(192**-0.5)
    assert config.max_positions == 1_048_576 and config.router.scale == 2.446


KDA = dict(PUBLISHED["linear_attn_config"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_res_block_size": 12}, "attn_res_block_size 12 is Kimi-K3's"),
        ({"linear_attn_config": KDA | {"gate_lower_bound": -5.0}}, "gate_lower_bound -5.0 is Kimi"),
        ({"hidden_act": "situ"}, 'hidden_act "situ"'),
        ({"mla_use_nope": False}, "mla_use_nope false"),
        ({"linear_attn_config": [1]}, "linear_attn_config must be an object"),
        ({"linear_attn_config": None}, "linear_attn_config and layer_types are missing"),
        ({"linear_attn_config": KDA | {"kda_layers": [1, 2]}}, "layer 3 is in neither"),
        ({"linear_attn_config": KDA | {"kda_layers": [4]}}, "layer 4 is named twice"),
        ({"linear_attn_config": KDA | {"kda_layers": [0]}}, "kda_layers must be a list of layers"),
        ({"linear_attn_config": KDA | {"short_conv_kernel_size": 1}}, "only 2 and more"),
        ({"num_experts_per_token": 300}, "num_experts_per_tok 300 exceeds the 256"),
        ({"num_expert_group": 3}, "256 experts do not divide into 3 groups"),
        ({"moe_router_activation_func": "softmax"}, 'moe_router_activation_func "softmax"'),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Config.from_hf(PUBLISHED | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must be a list with an entry"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, 'not "mamba"'),
        ({"mlp_layer_types": ["dense"] * 3 + ["hash"]}, "mlp_layer_types must say dense or sparse"),
    ],
)
def test_rewritten_lists_are_read_strictly(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Config.from_hf({"architectures": [TINY["kimi_linear"][0]], **KIMI_LINEAR, **changes})
