"""Every fault of a checkpoint in one sentence; only the rank's slices are read."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY, read_config, write_tiny

from batchmla import kernels
from batchmla.errors import JobError
from batchmla.models import get_family
from batchmla.models.load import count_model, load_model
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.checkpoint import Checkpoint
from batchmla.weights.load import check, fill_random, load

CPU = torch.device("cpu")
SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in TINY:
        folders[name] = tmp_path_factory.mktemp(name)
        write_tiny(folders[name], name)
    return folders


def copy_with(
    folder: Path, target: Path, **changes: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The checkpoint of `folder` with tensors replaced, added, or dropped (None)."""
    tensors = load_file(folder / SINGLE)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    target.mkdir(exist_ok=True)
    save_file(tensors, target / SINGLE)
    (target / "config.json").write_text((folder / "config.json").read_text())
    return tensors


def load_from(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    raw = read_config(folder) | changes
    ops = kernels.load("reference")
    return load_model(folder, raw, Placement(), Par.single(), ops, dtype, CPU)


def test_missing_unexpected_and_misshaped_come_together(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    copy_with(
        saved["v3"],
        tmp_path,
        **{
            "model.norm.weight": None,
            "model.layers.1.mlp.experts.7.up_proj.weight": None,
            "model.layers.2.mlp.gate.weight": torch.zeros(16, 64),
            "model.layers.0.self_attn.o_proj.bias": torch.zeros(128),
            "model.layers.0.mlp.down_proj.weight": torch.zeros(128, 192, dtype=torch.int8),
        },
    )
    with pytest.raises(JobError) as caught:
        load_from(tmp_path)
    message = str(caught.value)
    assert "5 faults" in message
    for part in (
        "model.norm.weight is missing",
        "experts.7.up_proj.weight is missing",
        "layers.2.mlp.gate.weight has shape [16, 64], not [16, 128]",
        "o_proj.bias is unexpected",
        "mlp.down_proj.weight is I8, and config.json has no quantization_config",
    ):
        assert part in message


def test_mtp_layers_are_skipped_with_one_line(
    saved: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {f"model.layers.{layer}.eh_proj.weight": torch.zeros(2, 2) for layer in (3, 4, 12)}
    copy_with(saved["v3"], tmp_path, **extra)
    with caplog.at_level(logging.INFO):
        load_from(tmp_path)
    lines = [record.message for record in caplog.records if "multi-token" in record.message]
    assert lines == ["skipped 3 tensors: multi-token prediction is not used"]
    copy_with(saved["v3"], tmp_path, **{"model.layers.2.eh_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(JobError, match=r"layers\.2\.eh_proj\.weight is unexpected"):
        load_from(tmp_path)


@pytest.mark.parametrize("name", ["k2", "v2", "qwen3_moe", "minimax_m2"])
def test_layers_behind_the_last_are_unexpected_without_draft_heads(
    saved: dict[str, Path], tmp_path: Path, name: str
) -> None:
    copy_with(saved[name], tmp_path, **{"model.layers.3.norm.weight": torch.zeros(2)})
    with pytest.raises(JobError, match=r"layers\.3\.norm\.weight is unexpected"):
        load_from(tmp_path)
    if name == "minimax_m2":
        load_from(tmp_path, num_mtp_modules=3)


def test_a_tied_head_may_be_saved_too(saved: dict[str, Path], tmp_path: Path) -> None:
    head = load_file(saved["llama_tied"] / SINGLE)["model.embed_tokens.weight"].clone()
    copy_with(saved["llama_tied"], tmp_path, **{"lm_head.weight": head})
    model = load_from(tmp_path)
    assert model.head.weight.packed.plain is model.embed.weight.tensor


def test_shards_are_found_through_the_index(saved: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(saved["v3"] / SINGLE)
    (tmp_path / "config.json").write_text((saved["v3"] / "config.json").read_text())
    names, index = sorted(tensors), {}
    for shard in range(3):
        file = f"model-{shard}.safetensors"
        mine = names[shard::3]  # every layer straddles all files
        save_file({name: tensors[name] for name in mine}, tmp_path / file)
        index |= dict.fromkeys(mine, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole, sharded = (dict(load_from(f).named_weights()) for f in (saved["v3"], tmp_path))
    for name, weight in whole.items():
        assert torch.equal(weight.packed.plain, sharded[name].packed.plain), name

    (tmp_path / "model-1.safetensors").unlink()
    broken = tmp_path / "model-2.safetensors"
    broken.write_bytes(broken.read_bytes()[:-10])
    with pytest.raises(
        JobError, match=r"model-1.* is missing \(\d+ tensors: model.*model-2.*cut off"
    ):
        load_from(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\x05", "not a safetensors file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            r"model\.safetensors is a git-LFS pointer, not the weights.*run git lfs pull",
        ),
        ((900).to_bytes(8, "little") + b"{}", "ends inside its header"),
        ((9).to_bytes(8, "little") + b"not json!", "broken header"),
        ((2).to_bytes(8, "little") + b"[]", "broken header: it is no JSON object"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "broken header: a has no dtype, shape and place"),
        (
            (60).to_bytes(8, "little")
            + b'{"a": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}'.ljust(60),
            "broken header: a has no dtype",
        ),
        (
            (66).to_bytes(8, "little")
            + b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}}'.ljust(66),
            "a has 8 bytes",
        ),
    ],
)
def test_files_that_are_not_what_they_say(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(JobError, match=message):
        Checkpoint.open(tmp_path)


def test_folders_without_usable_weights(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has no weights"):
        Checkpoint.open(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"")
    with pytest.raises(JobError, match=r"other\.safetensors but neither"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(JobError, match=r"pickles \(pytorch_model\.bin\)"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(JobError, match="no index of safetensors files"):
        Checkpoint.open(tmp_path)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON; download the model again"),
        ("[]", "has no map weight_map from tensors to files"),
        ('{"weight_map": []}', "has no map weight_map"),
        ('{"weight_map": {"a": null}}', "weight_map gives a no file name"),
        ('{"weight_map": {"a": "x.safetensors"}}', r"x\.safetensors is missing \(1 tensor: a\)"),
        ('{"weight_map": {"a": "../x"}}', 'names "../x", which is not in the folder'),
        ("version https://git-lfs.github.com/spec/v1", "is a git-LFS pointer.*run git lfs pull"),
    ],
)
def test_a_broken_index_is_told_in_words(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(JobError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert "Error(" not in str(caught.value) and "None" not in str(caught.value)


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_a_folder_in_a_files_place_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(JobError, match="is a folder where a file should be"):
        Checkpoint.open(tmp_path)


def test_a_shard_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}')
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(JobError, match=r"x\.safetensors is a folder where a file should be"):
        Checkpoint.open(tmp_path)


def test_one_fault_is_singular_and_many_are_counted(saved: dict[str, Path], tmp_path: Path) -> None:
    copy_with(saved["v3"], tmp_path, **{"model.norm.weight": None})
    with pytest.raises(JobError, match=r"\(1 fault\): model\.norm\.weight is missing: download"):
        load_from(tmp_path)
    names = [name for name in load_file(saved["v3"] / SINGLE) if "experts." in name]
    extra = {"model.extra.weight": torch.zeros(2)}
    copy_with(saved["v3"], tmp_path, **dict.fromkeys(names), **extra)
    with pytest.raises(JobError) as caught:
        load_from(tmp_path)
    message = str(caught.value)
    assert f"({len(names) + 1} faults)" in message and message.count("is missing") == 8
    assert f"; {len(names) - 8} more are missing" in message
    assert "model.extra.weight is unexpected" in message


@pytest.mark.parametrize("name", TINY)
def test_ranks_read_disjoint_slices_that_make_up_the_whole(
    saved: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, ops = read_config(saved[name]), kernels.load("reference")
    family = get_family(raw)
    config = family.Config.from_hf(raw)
    read_bytes = []
    plain_read = Checkpoint.read

    def counted(self: Checkpoint, tensor: str, slices: tuple[slice, ...]) -> torch.Tensor:
        part = plain_read(self, tensor, slices)
        read_bytes[-1] += part.numel() * part.element_size()
        return part

    monkeypatch.setattr(Checkpoint, "read", counted)
    models = []
    for placement in (Placement(), *(Placement(tensor=2, rank=rank) for rank in range(2))):
        checkpoint = Checkpoint.open(saved[name])
        assert checkpoint.nbytes == (saved[name] / SINGLE).stat().st_size - _header_bytes(
            saved[name]
        )
        check(checkpoint, family.rules(config), placement)
        model = family.build(config, Par(placement), ops)
        read_bytes.append(0)
        load(model, checkpoint, family.rules(config), placement, ops, torch.float32, CPU)
        models.append(dict(model.named_weights()))
    assert read_bytes[0] == checkpoint.nbytes
    assert read_bytes[1] == read_bytes[2] < 0.65 * read_bytes[0]
    whole, first, second = models
    for key in ("embed.weight", "head.weight"):
        halves = torch.cat((first[key].packed.plain, second[key].packed.plain))
        assert torch.equal(halves, whole[key].packed.plain)
    for key, weight in whole.items():
        if key.endswith(("out.weight", "ffn.down.weight")):
            halves = torch.cat((first[key].packed.plain, second[key].packed.plain), dim=1)
            assert torch.equal(halves, weight.packed.plain), key


def _header_bytes(folder: Path) -> int:
    with (folder / SINGLE).open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_weights_take_the_asked_dtype_and_the_router_stays_exact(saved: dict[str, Path]) -> None:
    weights = dict(load_from(saved["v3"], torch.bfloat16).named_weights())
    tensors = load_file(saved["v3"] / SINGLE)
    router = weights["layers.1.ffn.router.weight"].packed.plain
    assert torch.equal(router, tensors["model.layers.1.mlp.gate.weight"])
    bias = weights["layers.1.ffn.router.bias"].packed.plain
    assert torch.equal(bias, tensors["model.layers.1.mlp.gate.e_score_correction_bias"])
    up = weights["layers.2.ffn.experts_up"].packed.plain
    assert up.dtype == torch.bfloat16
    gate = tensors["model.layers.2.mlp.experts.5.gate_proj.weight"]
    assert torch.equal(up[5, : len(gate)], gate.bfloat16())


def test_dummy_weights_are_the_same_on_every_run_and_of_sane_size(saved: dict[str, Path]) -> None:
    raw, ops = read_config(saved["v3"]), kernels.load("reference")
    family = get_family(raw)
    made = []
    for _ in range(2):
        model = family.build(family.Config.from_hf(raw), Par.single(), ops)
        fill_random(model, ops, torch.float32, CPU)
        made.append(dict(model.named_weights()))
    for name, weight in made[0].items():
        values = weight.packed.plain
        assert torch.equal(values, made[1][name].packed.plain), name
        if values.dim() > 1:
            assert values.std().item() == pytest.approx(values.shape[-1] ** -0.5, rel=0.1), name
    first, second = (made[0][f"layers.{layer}.attention.kv_b"].packed.plain for layer in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TINY)
def test_counted_bytes_are_those_of_the_loaded_model(
    saved: dict[str, Path], name: str, dtype: torch.dtype, backend: str
) -> None:
    raw, ops = read_config(saved[name]), kernels.load(backend)
    model = load_model(saved[name], raw, Placement(), Par.single(), ops, dtype, CPU)
    held = {}
    for _, weight in model.named_weights():  # type: ignore[attr-defined]
        packed = weight.packed
        for tensor in (*packed.laid_out, *filter(torch.is_tensor, (packed.plain, packed.panels))):
            held[id(tensor)] = math.prod(tensor.shape) * tensor.element_size()
    assert count_model(raw, Placement(), ops, dtype).weights_bytes == sum(held.values())


def test_layers_are_counted_while_they_are_read(
    saved: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    raw, ops = read_config(saved["v3"]), kernels.load("reference")
    family = get_family(raw)
    config = family.Config.from_hf(raw)
    told = []
    for log_every_s in (0.0, 60.0):
        caplog.clear()
        model = family.build(config, Par.single(), ops)
        with caplog.at_level(logging.INFO, "batchmla"):
            load(
                model, Checkpoint.open(saved["v3"]), family.rules(config), Placement(), ops,
                torch.float32, CPU, log_every_s=log_every_s,
            )  # fmt: skip
        told.append([each.getMessage() for each in caplog.records])
    assert told == [[f"loading {done}/3 layers" for done in (1, 2, 3)], []]
