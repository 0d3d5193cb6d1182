"""What a config.json must say, what it may say two ways, and what is refused by name."""

from typing import Any

import pytest
import torch
from published import DEEPSEEK_R1, DEEPSEEK_V2_LITE, KIMI_K2, MINIMAX_M2
from tiny import LLAMA3, TINY, make_oracle, raw_config

from batchmla import kernels
from batchmla.errors import JobError
from batchmla.layers.rope import RopeKind, RopeSpec
from batchmla.models import get_family
from batchmla.models.load import count_model
from batchmla.placement import Placement
from batchmla.weights.rules import expand


def read(raw: dict[str, Any]) -> Any:
    return get_family(raw).Config.from_hf(raw)


def test_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(JobError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*DeepseekV3ForCausalLM"):
        get_family({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(JobError, match="names no architectures"):
        get_family({})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ("llama", {"attention_bias": True}, "attention_bias true"),
        ("llama", {"mlp_bias": True}, "mlp_bias true"),
        ("llama", {"hidden_size": 66}, "hidden_size 66"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ("llama", {"vocab_size": "256"}, "vocab_size must be a positive integer"),
        (
            "llama",
            {"intermediate_size": None},
            "intermediate_size is null; it must be a positive integer",
        ),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, 'rope type "longrope"'),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor"),
        ("llama", {"dtype": "float8"}, 'dtype "float8"'),
        ("llama", {"quantization_config": {}}, "quant_method"),
        ("llama", {"hidden_size": 10**30}, "hidden_size 1000000000000000000000000000000 exceeds"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 exceeds 10000"),
        ("llama", {"head_dim": 31}, "head_dim 31 must be even"),
        ("llama", {"hidden_size": 60}, r"hidden_size 60 / num_attention_heads 4 = 15 must be even"),
        ("llama", {"vocab_size": True}, "vocab_size must be a positive integer, not true"),
        ("llama", {"rope_parameters": {"rope_theta": 1}}, "rope_theta 1 must exceed 1"),
        ("llama", {"rope_parameters": "x"}, 'rope_parameters must be an object, not "x"'),
        ("v3", {"qk_rope_head_dim": 31}, "qk_rope_head_dim 31 must be even"),
        ("v3", {"qk_rope_head_dim": 10**9}, "qk_rope_head_dim 1000000000 exceeds 65536"),
        ("v3", {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, not 0"),
        ("v3", {"n_routed_experts": 10**9}, "n_routed_experts 1000000000 exceeds 10000"),
        ("v3", {"first_k_dense_replace": False}, "first_k_dense_replace must be"),
        (
            "v3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "mscale": "x",
                    "original_max_position_embeddings": 16,
                }
            },
            'mscale must be a positive number, not "x"',
        ),
        ("qwen3", {"layer_types": [{}]}, "layer_types may name full_attention only"),
        ("minimax_m2", {"partial_rotary_factor": -1}, "partial_rotary_factor must be a number"),
        ("v3", {"attention_bias": True}, "attention_bias true"),
        ("v3", {"rope_interleave": False}, "rope_interleave false"),
        ("v3", {"scoring_func": "softmax"}, 'scoring_func "softmax"'),
        ("v3", {"topk_method": "greedy"}, 'topk_method "greedy"'),
        ("v3", {"n_group": 3}, "n_group 3"),
        ("v3", {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("v32", {"q_lora_rank": None}, "q_lora_rank is null"),
        ("v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave true"),
        ("v32", {"index_head_dim": 4}, "index_head_dim 4 is less than the qk_rope_head_dim 8"),
        ("v32", {"index_topk": 0}, "index_topk must be a positive integer, not 0"),
        ("v32", {"index_n_heads": None}, "index_n_heads is null"),
        ("v32", {"scoring_func": "softmax"}, 'scoring_func "softmax"'),
        ("v32", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ("v2", {"scoring_func": "sigmoid"}, 'scoring_func "sigmoid"'),
        ("v2", {"topk_method": "noaux_tc"}, 'topk_method "noaux_tc"'),
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob true"),
        ("v2", {"n_group": None}, "n_group is null; it must be a positive integer"),
        ("v2", {"n_group": 5}, "n_group 5"),
        ("v2", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts"),
        ("v2_lite", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts"),
        ("v2", {"mlp_bias": True}, "mlp_bias true"),
        ("qwen2", {"attention_bias": False}, "attention_bias false"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4096},
            "use_sliding_window with sliding_window 4096",
        ),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types.*sliding windows are not supported",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias true"),
        ("qwen3", {"head_dim": None}, "head_dim is null; it must be a positive integer"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic"}}, 'rope type "dynamic"'),
        ("qwen3", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.*full_attention"),
        ("qwen3", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers must be a list"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 64},
            "use_sliding_window with sliding_window 64",
        ),
        ("minimax_m2", {"scoring_func": "softmax"}, 'scoring_func "softmax"'),
        ("minimax_m2", {"qk_norm_type": "per_head"}, 'qk_norm_type "per_head"'),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm false"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias false"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size 64"),
        ("minimax_m2", {"attn_type_list": [0, 1]}, "attn_type_list"),
        ("minimax_m2", {"sliding_window": 128}, "sliding_window 128"),
        ("minimax_m2", {"rotary_dim": 17}, "rotary_dim 17"),
        ("minimax_m2", {"rotary_dim": 64}, "rotary_dim 64"),
        ("minimax_m2", {"partial_rotary_factor": 0.25}, r"partial_rotary_factor 0\.25"),
        ("minimax_m2", {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("minimax_m2", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        read(raw_config(name, **changes))


@pytest.mark.parametrize("name", TINY)
def test_a_missing_value_is_said_to_be_missing(name: str) -> None:
    needed = ["vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers"]
    if name.startswith(("v2", "v3", "k2")):
        needed += ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "n_routed_experts"]
    for field in needed:
        raw = raw_config(name)
        del raw.get("text_config", raw)[field]
        with pytest.raises(JobError, match=f"{field} is missing; it must be a positive integer"):
            read(raw)


def test_an_architecture_that_is_no_name_is_refused() -> None:
    with pytest.raises(JobError, match="is not known; known are"):
        get_family({"architectures": [{}]})


def test_old_and_new_rope_fields_mean_the_same() -> None:
    new = raw_config("llama")
    old = raw_config("llama", rope_theta=LLAMA3["rope_theta"])
    del old["rope_parameters"]
    old["rope_scaling"] = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    older = old | {"rope_scaling": old["rope_scaling"] | {"type": "llama3"}}
    del older["rope_scaling"]["rope_type"]
    assert read(new) == read(old) == read(older)
    assert read(new).rope.kind is RopeKind.LLAMA3
    assert read(raw_config("llama", torch_dtype="bfloat16")).dtype == "bfloat16"
    assert read(raw_config("llama", dtype="float16")).dtype == "float16"


def test_a_window_that_no_layer_uses_is_no_fault() -> None:
    plain = read(raw_config("qwen3"))
    assert read(raw_config("qwen3", sliding_window=4096, use_sliding_window=False)) == plain
    kinds = ["full_attention", "full_attention"]
    assert read(raw_config("qwen3", layer_types=kinds, use_sliding_window=True)) == plain


def test_sparse_layers_follow_the_step_and_the_list() -> None:
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    raw = raw_config("qwen3_moe", **changes)
    assert read(raw).experts.layers == (1, 5)
    oracle = make_oracle("qwen3_moe", **changes)
    sparse = [i for i, layer in enumerate(oracle.model.layers) if hasattr(layer.mlp, "experts")]
    assert sparse == [1, 5]
    names = {piece.source for piece in expand(get_family(raw).rules(read(raw)), Placement())}
    assert "model.layers.3.mlp.up_proj.weight" in names
    assert "model.layers.5.mlp.experts.7.up_proj.weight" in names
    assert read(raw_config("qwen3_moe", mlp_only_layers=[0, 1, 2])).experts is None


def test_minimax_weights_are_found_under_their_published_names() -> None:
    config, family = read(MINIMAX_M2), get_family(MINIMAX_M2)
    pieces = {piece.source: piece for piece in expand(family.rules(config), Placement())}
    moe = "model.layers.61.block_sparse_moe"
    shapes = {
        f"{moe}.gate.weight": (256, 3072),
        f"{moe}.e_score_correction_bias": (256,),
        f"{moe}.experts.255.w1.weight": (1536, 3072),
        f"{moe}.experts.255.w3.weight": (1536, 3072),
        f"{moe}.experts.255.w2.weight": (3072, 1536),
        "model.layers.61.self_attn.q_norm.weight": (6144,),
        "model.layers.61.self_attn.k_norm.weight": (1024,),
    }
    assert {name: pieces[name].shape for name in shapes} == shapes
    order = [name for name, piece in pieces.items() if piece.target == "layers.61.ffn.experts_up"]
    assert order.index(f"{moe}.experts.0.w1.weight") < order.index(f"{moe}.experts.0.w3.weight")


def test_rotated_width_may_be_said_three_ways() -> None:
    raw = raw_config("minimax_m2")
    rope = raw["rope_parameters"]
    by_width = read(raw).rope
    del raw["rotary_dim"]
    assert by_width.width == 16
    assert read(raw | {"rope_parameters": rope | {"partial_rotary_factor": 0.5}}).rope == by_width
    assert read(raw | {"partial_rotary_factor": 0.5}).rope == by_width
    assert read(raw).rope.width == 32
    del raw["rope_parameters"]
    assert read(raw).rope.theta == 5e6


def test_greedy_routing_knows_no_groups() -> None:
    plain = read(raw_config("v2_lite"))
    assert read(raw_config("v2_lite", n_group=4, topk_group=2)) == plain
    assert plain.router.groups == 1 and not plain.has_router_bias


def test_scales_of_published_models() -> None:
    assert read(DEEPSEEK_V2_LITE).attention.scale == pytest.approx(0.1147214, abs=1e-7)
    kimi = read(KIMI_K2)
    assert kimi.attention.scale == pytest.approx(0.1308608, abs=1e-7)
    ratio = RopeSpec(width=64, theta=5e4).frequencies() / kimi.rope.frequencies()
    torch.testing.assert_close(ratio[:20], torch.ones(20))  # a step, no ramp
    torch.testing.assert_close(ratio[20:], torch.full((12,), 32.0))
    assert (kimi.router.groups, kimi.router.scale, kimi.num_mtp_layers) == (1, 2.827, 0)
    assert (read(MINIMAX_M2).rope.width, read(MINIMAX_M2).dtype) == (64, "bfloat16")


@pytest.mark.parametrize("name", [name for name in TINY if name != "kimi_linear"])  # no rope
def test_rope_frequencies_equal_the_oracle(name: str) -> None:
    config = read(raw_config(name))
    rotary = make_oracle(name).model.rotary_emb
    if name == "v4":
        for kind, spec in (("main", config.window_rope), ("compress", config.entry_rope)):
            wanted = getattr(rotary, f"{kind}_inv_freq")
            torch.testing.assert_close(spec.frequencies(), wanted, rtol=1e-6, atol=0)
            assert spec.multiplier == getattr(rotary, f"{kind}_attention_scaling") == 1
        return
    torch.testing.assert_close(config.rope.frequencies(), rotary.inv_freq, rtol=1e-6, atol=0)
    assert config.rope.multiplier == rotary.attention_scaling


def test_yarn_without_mscale_scales_cos_and_sin_as_the_oracle() -> None:
    yarn = {k: v for k, v in TINY["v3"][1]["rope_parameters"].items() if "mscale" not in k}
    config = read(raw_config("v3", rope_parameters=yarn))
    oracle = make_oracle("v3", rope_parameters=yarn)
    assert config.rope.multiplier == pytest.approx(oracle.model.rotary_emb.attention_scaling)
    assert config.attention.scale == pytest.approx(oracle.model.layers[0].self_attn.scaling)


def test_r1_needs_only_its_config() -> None:
    config, family = read(DEEPSEEK_R1), get_family(DEEPSEEK_R1)
    layout = family.layout(config, "bfloat16", Placement(), 64)
    assert layout.token_bytes == 70_272
    assert layout.bytes_for(32_768) == 2_302_672_896
    assert config.attention.scale == pytest.approx(0.1352338, abs=1e-7)
    assert config.quantization == "fp8"
    count = count_model(DEEPSEEK_R1, Placement(), kernels.load("reference"), torch.bfloat16)
    assert count.total == 671_026_419_200
    assert 37e9 < count.active < 38e9
    router_bytes = 58 * 256 * 7169 * 2  # held in float32
    assert count.weights_bytes == 2 * count.total + router_bytes


def test_r1_ranks_add_up() -> None:
    ops = kernels.load("reference")
    whole = count_model(DEEPSEEK_R1, Placement(), ops, torch.bfloat16)
    eighth = count_model(DEEPSEEK_R1, Placement(tensor=8), ops, torch.bfloat16)
    assert whole.total / 8 < eighth.total < whole.total / 7.8


@pytest.mark.parametrize("raw", [DEEPSEEK_R1, KIMI_K2, MINIMAX_M2], ids=["r1", "k2", "minimax"])
def test_quantised_weights_are_counted_as_published(raw: dict[str, Any]) -> None:
    ops = kernels.load("reference")
    count = count_model(raw, Placement(), ops, torch.bfloat16, keeps_quantised=True)
    assert count.total < count.weights_bytes < 1.02 * count.total  # embedding and head are plain


@pytest.mark.parametrize("name", TINY)
def test_count_equals_the_oracle(name: str) -> None:
    oracle = make_oracle(name)
    count = count_model(raw_config(name), Placement(), kernels.load("reference"), torch.float32)
    held = ("bias", "tid2eid")
    biases = sum(
        value.numel() for key, value in oracle.named_buffers() if any(word in key for word in held)
    )
    assert count.total == sum(value.numel() for value in oracle.parameters()) + biases
    assert count.weights_bytes == 4 * count.total


def test_heads_that_do_not_divide_are_refused() -> None:
    raw = raw_config("llama", num_attention_heads=6, num_key_value_heads=3, head_dim=16)
    with pytest.raises(JobError, match=r"3 kv heads .* over 2 devices"):
        count_model(raw, Placement(tensor=2), kernels.load("reference"), torch.float32)
