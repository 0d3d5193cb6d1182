"""A checkpoint of hundreds of gigabytes that takes a few megabytes: published names, dtypes and
shapes of DeepSeek R1, in sparse files whose norms and biases alone have bytes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from damage import INDEX, shard_name

SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
BLOCK = 128
WRITTEN = ("norm.weight", "e_score_correction_bias")

Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def r1_tensors(raw: dict[str, Any]) -> Iterator[Tensor]:
    """Every tensor, in the order of layers; the draft layer behind the last one too."""
    width, vocab, heads = raw["hidden_size"], raw["vocab_size"], raw["num_attention_heads"]
    latent, query = raw["kv_lora_rank"], raw["q_lora_rank"]
    nope, rope, value = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    yield "model.embed_tokens.weight", "BF16", (vocab, width)
    for index in range(raw["num_hidden_layers"] + raw["num_nextn_predict_layers"]):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", "BF16", (width,)
        attention = f"{layer}.self_attn"
        yield f"{attention}.q_a_layernorm.weight", "BF16", (query,)
        yield f"{attention}.kv_a_layernorm.weight", "BF16", (latent,)
        yield from _matrix(f"{attention}.q_a_proj", query, width)
        yield from _matrix(f"{attention}.q_b_proj", heads * (nope + rope), query)
        yield from _matrix(f"{attention}.kv_a_proj_with_mqa", latent + rope, width)
        yield from _matrix(f"{attention}.kv_b_proj", heads * (nope + value), latent)
        yield from _matrix(f"{attention}.o_proj", width, heads * value)
        if index < raw["first_k_dense_replace"]:
            yield from _mlp(f"{layer}.mlp", width, raw["intermediate_size"])
            continue
        experts = raw["n_routed_experts"]
        yield f"{layer}.mlp.gate.weight", "BF16", (experts, width)
        yield f"{layer}.mlp.gate.e_score_correction_bias", "F32", (experts,)
        yield from _mlp(f"{layer}.mlp.shared_experts", width, raw["moe_intermediate_size"])
        for expert in range(experts):
            name = f"{layer}.mlp.experts.{expert}"
            yield from _mlp(name, width, raw["moe_intermediate_size"])
    yield "model.norm.weight", "BF16", (width,)
    yield "lm_head.weight", "BF16", (vocab, width)


def _matrix(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "F32", (-(-rows // BLOCK), -(-columns // BLOCK))


def _mlp(name: str, width: int, ffn: int) -> Iterator[Tensor]:
    for part in ("gate_proj", "up_proj"):
        yield from _matrix(f"{name}.{part}", ffn, width)
    yield from _matrix(f"{name}.down_proj", width, ffn)


def write_sparse(folder: Path, raw: dict[str, Any], num_shards: int) -> tuple[int, int]:
    """Config, index and shards; returns tensors and bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = list(r1_tensors(raw))
    per_shard = -(-len(tensors) // num_shards)
    index: dict[str, str] = {}
    total_bytes = 0
    for number in range(1, num_shards + 1):
        mine = tensors[(number - 1) * per_shard : number * per_shard]
        file = shard_name(number, num_shards)
        total_bytes += _write_shard(folder / file, mine)
        index |= dict.fromkeys((name for name, _, _ in mine), file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return len(tensors), total_bytes


def _write_shard(path: Path, tensors: list[Tensor]) -> int:
    header, at = {}, 0
    for name, dtype, shape in tensors:
        num_bytes = SIZES[dtype] * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + at)
        for name, dtype, shape in tensors:
            if name.endswith(WRITTEN):
                ones = torch.ones(shape, dtype=torch.float32 if dtype == "F32" else torch.bfloat16)
                os.pwrite(file.fileno(), ones.view(torch.uint8).numpy().tobytes(),
                          start + header[name]["data_offsets"][0])  # fmt: skip
    return start + at
