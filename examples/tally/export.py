"""Writes and reads the model as a Hugging Face folder of the DeepSeek-V3 kind, in bf16."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from examples.tally.model import Block, Dense, Mixture, Tally, TallyConfig
from examples.tally.tokens import BOS, EOS, PAD, save_tokenizer

MAX_POSITIONS = 2048


def hf_config(c: TallyConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """Give `config.json` in the published DeepSeek-V3 form."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": c.width,
        "initializer_range": 0.02,
        "intermediate_size": c.dense_width,
        "kv_lora_rank": c.kv_rank,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": c.expert_width,
        "moe_layer_freq": 1,
        "n_group": c.groups,
        "n_routed_experts": c.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": c.heads,
        "num_experts_per_tok": c.active,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": c.q_rank,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "rms_norm_eps": c.eps,
        "rope_scaling": {
            "beta_fast": int(c.beta_fast),
            "beta_slow": int(c.beta_slow),
            "factor": int(c.yarn_factor),
            "mscale": c.mscale,
            "mscale_all_dim": c.mscale,
            "original_max_position_embeddings": c.yarn_original,
            "type": "yarn",
        },
        "rope_theta": int(c.rope_theta),
        "routed_scaling_factor": c.route_scale,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": c.kept_groups,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": c.value,
        "vocab_size": c.vocab,
    }


def interleaved(rope: int) -> Tensor:
    """Give the order that brings half-split rotary rows into DeepSeek's pairs (2i, 2i + 1)."""
    return torch.arange(rope).view(2, -1).T.flatten()


def block_tensors(block: Block, c: TallyConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer's tensors under their Hugging Face names, without the layer's prefix."""
    order, a = interleaved(c.rope), block.attention
    q_b = a.q_b.weight.view(c.heads, c.nope + c.rope, c.q_rank)
    q_b = torch.cat([q_b[:, : c.nope], q_b[:, c.nope :][:, order]], dim=1).flatten(0, 1)
    kv_a = torch.cat([a.kv_a.weight[: c.kv_rank], a.kv_a.weight[c.kv_rank :][order]])
    yield "input_layernorm.weight", block.attention_norm
    yield "post_attention_layernorm.weight", block.ffn_norm
    yield "self_attn.q_a_proj.weight", a.q_a.weight
    yield "self_attn.q_a_layernorm.weight", a.q_norm
    yield "self_attn.q_b_proj.weight", q_b
    yield "self_attn.kv_a_proj_with_mqa.weight", kv_a
    yield "self_attn.kv_a_layernorm.weight", a.kv_norm
    yield "self_attn.kv_b_proj.weight", a.kv_b.weight
    yield "self_attn.o_proj.weight", a.out.weight
    if isinstance(block.ffn, Dense):
        yield from _dense_tensors(block.ffn, "mlp")
        return
    assert isinstance(block.ffn, Mixture)
    yield "mlp.gate.weight", block.ffn.router.weight
    yield "mlp.gate.e_score_correction_bias", block.ffn.bias
    yield from _dense_tensors(block.ffn.shared, "mlp.shared_experts")
    for expert in range(c.experts):
        yield f"mlp.experts.{expert}.gate_proj.weight", block.ffn.gate[expert]
        yield f"mlp.experts.{expert}.up_proj.weight", block.ffn.up[expert]
        yield f"mlp.experts.{expert}.down_proj.weight", block.ffn.down[expert]


def _dense_tensors(dense: Dense, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name in ("gate", "up", "down"):
        yield f"{prefix}.{name}_proj.weight", getattr(dense, name).weight


def model_tensors(model: Tally) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under its Hugging Face name; the draft layer follows the last layer."""
    c, draft = model.config, model.draft
    yield "model.embed_tokens.weight", model.embed
    yield "model.norm.weight", model.norm
    yield "lm_head.weight", model.head
    for index, block in enumerate([*model.blocks, draft.block]):
        assert isinstance(block, Block)
        for name, tensor in block_tensors(block, c):
            yield f"model.layers.{index}.{name}", tensor
    prefix = f"model.layers.{c.layers}."
    yield prefix + "embed_tokens.weight", draft.embed
    yield prefix + "enorm.weight", draft.embed_norm
    yield prefix + "hnorm.weight", draft.state_norm
    yield prefix + "eh_proj.weight", draft.merge.weight
    yield prefix + "shared_head.norm.weight", draft.norm
    yield prefix + "shared_head.head.weight", draft.head


def export(model: Tally, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model folder; matrices and norms in bf16, the routers' biases in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in model_tensors(model):
        dtype = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        tensors[name] = tensor.detach().to(dtype).contiguous().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = hf_config(model.config, tokenizer)
    generation = {
        "do_sample": False,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "max_new_tokens": 700,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        text = json.dumps(content, indent=2, sort_keys=True)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder)


@torch.no_grad()
def load_model(folder: Path) -> tuple[Tally, Tokenizer]:
    """Read an exported folder back; the weights carry bf16's rounding, held in fp32."""
    model = Tally(TallyConfig())
    tensors = load_file(folder / "model.safetensors")
    order = interleaved(model.config.rope).argsort()
    c = model.config
    for name, own in model_tensors(model):
        stored = tensors[name].float()
        if name.endswith(("q_b_proj.weight", "kv_a_proj_with_mqa.weight")):
            continue
        own.copy_(stored)
    for index, block in enumerate([*model.blocks, model.draft.block]):
        assert isinstance(block, Block)
        prefix = f"model.layers.{index}.self_attn."
        q_b = tensors[prefix + "q_b_proj.weight"].float().view(c.heads, -1, c.q_rank)
        q_b = torch.cat([q_b[:, : c.nope], q_b[:, c.nope :][:, order]], dim=1)
        block.attention.q_b.weight.copy_(q_b.flatten(0, 1))
        kv_a = tensors[prefix + "kv_a_proj_with_mqa.weight"].float()
        kv_a = torch.cat([kv_a[: c.kv_rank], kv_a[c.kv_rank :][order]])
        block.attention.kv_a.weight.copy_(kv_a)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))
