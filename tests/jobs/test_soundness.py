"""Every way in which a model's folder is not sound, told in one sentence before anything large is
allocated; `run`, `plan` and `inspect` say the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import (
    INDEX,
    POINTER,
    change_tensor,
    cut,
    edit_header,
    edit_json,
    read_raw,
    set_config,
    shard_name,
    shard_of,
    whole,
    write_raw,
)
from refusals import assert_told, job_on, loaded_weights, refusal
from safetensors.torch import load_file
from typer.testing import CliRunner

from batchmla.cli import app
from batchmla.errors import JobError
from batchmla.jobs.inspect import inspect_model
from batchmla.jobs.local import check_local_engine
from batchmla.jobs.plan import plan_job

NORM = "model.norm.weight"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
GATE = "model.layers.1.mlp.gate"
BIAS = f"{GATE}.e_score_correction_bias"
DENSE = "model.layers.0.mlp.up_proj.weight"
ONE, TWO, THREE = (shard_name(number) for number in (1, 2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return whole(tmp_path / "model")


def test_a_whole_folder_passes_all_three(folder: Path) -> None:
    loaded = job_on(folder)
    check_local_engine(loaded.spec)
    assert plan_job(loaded).fits
    assert not [note for note in inspect_model(str(folder))["notes"] if "weights" in note]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (TWO, f"{TWO} is a git-LFS pointer"),
        (INDEX, f"{INDEX} is a git-LFS pointer"),
        ("config.json", "config.json is a git-LFS pointer"),
        ("tokenizer.json", "tokenizer.json is a git-LFS pointer"),
    ],
)
def test_a_git_lfs_pointer_is_named(folder: Path, file: str, words: str) -> None:
    (folder / file).write_text(POINTER)
    assert_told(folder, words, "run git lfs pull in that folder")


def _repeat(folder: Path) -> None:
    """A header that names one tensor twice."""
    header, data = read_raw(folder / ONE)
    name = next(name for name in header if name != "__metadata__")
    text = json.dumps(header)
    entry = f"{json.dumps(name)}: {json.dumps(header[name])}"
    write_raw(folder / ONE, (text[:-1] + f", {entry}}}").encode(), data)


def _double(folder: Path) -> None:
    """The final norm in a second file."""
    header, data = read_raw(folder / TWO)
    if shard_of(folder, NORM) == folder / TWO:
        header, data = read_raw(folder / ONE)
    end = len(data)
    header[NORM] = {"dtype": "BF16", "shape": [192], "data_offsets": [end, end + 384]}
    target = TWO if shard_of(folder, NORM) != folder / TWO else ONE
    write_raw(folder / target, header, data + bytes(384))


def _unknown_dtype(folder: Path) -> None:
    path = shard_of(folder, NORM)
    edit_header(path, lambda header: header[NORM].update(dtype="F4"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_repeat, "broken header: "),
        (_repeat, "is there twice"),
        (_double, f"{NORM} is in model-0000"),
        (_unknown_dtype, f"{NORM} has the dtype F4, which is none of "),
        (lambda folder: set_config(folder, moe_intermediate_size=32),
         "has shape [192, 64], not [192, 32]"),
        (lambda folder: set_config(folder, num_hidden_layers=3, num_nextn_predict_layers=0),
         "model.layers.3.input_layernorm.weight is unexpected"),
        (lambda folder: set_config(folder, num_hidden_layers=5), "model.layers.4."),
        (lambda folder: change_tensor(folder, DENSE, lambda w: None), f"{DENSE} is missing"),
        (lambda folder: edit_json(folder / INDEX, lambda raw: raw["weight_map"].update(x=ONE)),
         f"{ONE} lacks x"),
        (lambda folder: (folder / INDEX).write_text("{"), f"{INDEX} is not JSON"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_told(
    folder: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(folder)
    assert_told(folder, words)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [BIAS, NORM, "model.layers.2.self_attn.q_a_layernorm.weight"])
def test_biases_and_norms_that_are_not_finite_are_refused(
    folder: Path, name: str, value: float
) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3] = value
        return tensor

    count = load_file(shard_of(folder, name))[name].numel()
    change_tensor(folder, name, spoil)
    assert_told(folder, f"{name} holds 1 of {count} values that are not finite", faults=1)


def test_a_norm_of_zeros_is_refused_and_a_bias_of_zeros_is_not(folder: Path) -> None:
    change_tensor(folder, BIAS, torch.zeros_like)
    check_local_engine(job_on(folder).spec)
    change_tensor(folder, NORM, torch.zeros_like)
    assert_told(folder, f"{NORM} is a norm of zeros alone", faults=1)


def test_a_head_is_missing_tied_or_equal(folder: Path) -> None:
    change_tensor(folder, HEAD, lambda head: None)
    assert_told(folder, f"{HEAD} is missing, and config.json does not tie", faults=1)
    set_config(folder, tie_word_embeddings=True)
    check_local_engine(job_on(folder).spec)


def test_a_head_beside_a_tied_embedding_must_equal_it(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=True)
    assert_told(folder, f"{HEAD} differs from {EMBEDDING}", "set tie_word_embeddings", faults=1)
    embedding = load_file(shard_of(folder, EMBEDDING))[EMBEDDING]
    change_tensor(folder, HEAD, lambda head: embedding)
    check_local_engine(job_on(folder).spec)
    change_tensor(folder, HEAD, lambda head: embedding[:500].clone())
    assert_told(folder, f"{HEAD} has shape [500, 192], not the embedding's [512, 192]", faults=1)


def test_one_row_of_a_large_tied_head_that_differs_is_found_when_loading(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=True)
    embedding = load_file(shard_of(folder, EMBEDDING))[EMBEDDING]

    def spoil(_: torch.Tensor) -> torch.Tensor:
        head = embedding.clone()
        head[2] += 1  # none of the rows that are looked at first
        return head

    change_tensor(folder, HEAD, spoil)
    check_local_engine(job_on(folder).spec)
    with pytest.raises(JobError, match=f"{HEAD} differs from {EMBEDDING}"):
        loaded_weights(folder)


def test_tokens_beyond_the_embedding_are_named_and_fewer_are_fine(folder: Path) -> None:
    def add(raw: dict[str, Any], ids: range) -> None:
        like = raw["added_tokens"][-1]
        raw["added_tokens"] += [like | {"id": i, "content": f"<extra {i}>"} for i in ids]

    tokenizer = folder / "tokenizer.json"
    edit_json(tokenizer, lambda raw: add(raw, range(512, 514)))
    assert_told(
        folder,
        "token '<extra 512>' has the id 512, but the embedding ends at 511 (vocab_size 512)",
        "token '<extra 513>' has the id 513",
        faults=2,
    )
    edit_json(tokenizer, lambda raw: add(raw, range(514, 540)))
    assert_told(folder, "20 more are beyond the embedding", faults=28)
    edit_json(tokenizer, lambda raw: raw.update(added_tokens=raw["added_tokens"][:-29]))
    check_local_engine(job_on(folder).spec)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ('{"architectures": ["Deepseek', "is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "names no architectures"),
        ("\x00\x01", "is not JSON"),
    ],
)
def test_a_config_that_is_damaged_is_told(folder: Path, content: str, words: str) -> None:
    (folder / "config.json").write_text(content)
    loaded = job_on(folder)
    for call in (check_local_engine, lambda spec: plan_job(loaded)):
        with pytest.raises(JobError, match=words):
            call(loaded.spec)
    with pytest.raises(JobError, match=words):
        inspect_model(str(folder))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pytorch_model-00001-of-00002.bin", "are pickles (pytorch_model-00001-of-00002.bin)"),
        ("consolidated.00.pth", "convert them to safetensors"),
        ("tally-Q4_K_M.gguf", "are GGUF (tally-Q4_K_M.gguf), which is not read"),
        ("tf_model.h5", "are HDF5 (tf_model.h5)"),
    ],
)
def test_weights_of_other_formats_are_refused_by_name(folder: Path, file: str, words: str) -> None:
    for path in (folder / INDEX, *folder.glob("*.safetensors")):
        path.unlink()
    (folder / "training_args.bin").write_bytes(b"")
    (folder / file).write_bytes(b"GGUF")
    assert_told(folder, words)
    (folder / "config.json").unlink()  # as GGUF comes
    with pytest.raises(JobError) as caught:
        inspect_model(str(folder))
    assert words in str(caught.value)
    with pytest.raises(JobError, match=file.replace(".", r"\.")):
        inspect_model(str(folder / file))


def test_code_of_an_unknown_model_is_never_run(folder: Path) -> None:
    own = {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}
    (folder / "modeling_other.py").write_text("raise SystemExit('this code was run')")
    set_config(folder, auto_map=own)
    check_local_engine(job_on(folder).spec)  # a known model's code is not needed
    set_config(folder, architectures=["OtherForCausalLM"])
    loaded = job_on(folder)
    with pytest.raises(JobError) as caught:
        check_local_engine(loaded.spec)
    assert "architecture OtherForCausalLM of config.json is not known" in str(caught.value)
    assert "modeling_other.OtherForCausalLM) is never run" in str(caught.value)


def test_code_of_a_tokenizer_is_never_run(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_text("IQ== 0\n")
    (folder / "tokenization_own.py").write_text("raise SystemExit('this code was run')")
    own = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    edit_json(
        folder / "tokenizer_config.json",
        lambda raw: raw.update(auto_map=own, tokenizer_class="OwnTokenizer"),
    )
    notes = inspect_model(str(folder))["notes"]
    assert any("tokenization_own.OwnTokenizer" in n and "is never run" in n for n in notes), notes
    with pytest.raises(JobError, match=r"put a tokenizer\.json made with it there"):
        plan_job(job_on(folder))


def test_one_sentence_has_every_fault_and_every_way_out(folder: Path) -> None:
    (folder / ONE).write_text(POINTER)
    cut(folder / TWO, 1)
    (folder / THREE).unlink()
    change = {"id": 600, "content": "<more>"}
    edit_json(
        folder / "tokenizer.json",
        lambda raw: raw["added_tokens"].append(raw["added_tokens"][-1] | change),
    )
    set_config(folder, hidden_size=96)
    sentence = refusal(folder)
    for words in (
        f"{ONE} is a git-LFS pointer", f"{TWO} is cut off", f"{THREE} is missing", "'<more>'",
        "has shape", "run git lfs pull", "download the model again", "more are of another shape",
    ):  # fmt: skip
        assert words in sentence, sentence
    assert sentence.count("download the model again") == 1
    assert len(sentence) < 5000


def test_a_folder_without_weights_can_be_planned_and_not_run(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()  # an index alone comes with a download of the small files
    note = "no weights in the model folder: they were not checked"
    loaded = job_on(folder)
    assert note in plan_job(loaded).notes and note in inspect_model(str(folder))["notes"]
    with pytest.raises(JobError, match=f"{ONE} is missing"):
        check_local_engine(loaded.spec)
    dummy = job_on(folder, load_format="dummy")
    assert note not in plan_job(dummy).notes
    check_local_engine(dummy.spec)


@pytest.mark.parametrize("command", ["run", "plan", "inspect"])
def test_the_commands_end_with_2_and_write_nothing(folder: Path, command: str) -> None:
    cut(folder / TWO, 10)
    loaded = job_on(folder)
    job = folder.parent / "job.yaml"
    job.write_text(
        json.dumps(
            {name: loaded.resolved()[name] for name in ("model", "input", "prompt", "output")}
        )
    )
    target = folder if command == "inspect" else job
    done = CliRunner().invoke(app, [command, str(target)])
    assert done.exit_code == 2
    assert f"{TWO} is cut off" in done.stderr and "Traceback" not in done.stderr
    assert not (folder.parent / "out").exists()


def test_nothing_large_is_allocated_before_a_fault_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_tensor(folder, NORM, torch.zeros_like)
    made: list[int] = []
    plain = torch.empty

    def counted(*sizes: Any, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = plain(*sizes, **options)
        made.append(tensor.numel() * tensor.element_size())
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    with pytest.raises(JobError, match="a norm of zeros"):
        loaded_weights(folder)
    assert sum(made) < 2**20 < (folder / TWO).stat().st_size


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [(POINTER, "is a git-LFS pointer"), ('{"a', "is not JSON"), ("[" * 100_000, "is not JSON")],
)
def test_small_files_that_are_damaged_are_named(
    folder: Path, file: str, content: str, words: str
) -> None:
    (folder / file).write_text(content)
    with pytest.raises(JobError) as caught:
        plan_job(job_on(folder))
    assert f"{folder / file} {words}" in str(caught.value)
