"""Quantised checkpoints: their values, their faults, and what a rank reads of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quantise import Made, block_fp8, e4m3_value, group_fp4, group_int4
from quantised import WAYS, save, write_quantised
from safetensors.torch import load_file, save_file
from tiny import read_config

from batchmla import kernels
from batchmla.errors import JobError
from batchmla.kernels.ops import Ops
from batchmla.kernels.quant import Quantised
from batchmla.models.load import check_model, load_model
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.checkpoint import Checkpoint
from batchmla.weights.quant import Storage, scheme_of
from batchmla.weights.quant_config import read_quantisation
from batchmla.weights.quant_read import read_expanded, read_quantised
from batchmla.weights.rules import Rule, expand
from batchmla.weights.staging import Staging

CPU = torch.device("cpu")
SHAPE = (576, 320)  # partial blocks of 128 at both edges
# what the config says, and what makes a matrix
FORMATS: dict[str, tuple[dict[str, object], Callable[[torch.Tensor], Made]]] = {
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, block_fp8,
    ),
    "fp8 powers": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        lambda w: block_fp8(w, ending="scale", is_e8m0=True),
    ),
    "fp4": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, group_fp4),
    "int4": (WAYS["k2 int4"].config["quantization_config"], group_int4),
    "int4 float32": (
        WAYS["k2 int4"].config["quantization_config"],
        lambda w: group_int4(w, scale_dtype=torch.float32),
    ),
    "mxfp4": (
        WAYS["k2 mxfp4"].config["quantization_config"],
        lambda w: group_fp4(w, is_compressed=True),
    ),
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.15


class One:
    """A checkpoint of a few matrices `x0`, `x1`, …, which one weight stacks."""

    def __init__(self, folder: Path, form: str, shapes: list[tuple[int, int]]) -> None:
        said, make = FORMATS[form]
        raw = {"quantization_config": said}
        if form == "fp4":
            raw["expert_dtype"] = "fp4"
        made = [make(random(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
        tensors = {
            f"x{at}.{ending}": tensor
            for at, each in enumerate(made)
            for ending, tensor in each.tensors.items()
        }
        save(folder, tensors, raw)
        self.values = np.concatenate([each.values for each in made])
        self.checkpoint = Checkpoint.open(folder)
        self.storage = Storage(self.checkpoint.entries, read_quantisation(raw))
        self.shapes = shapes

    def rules(self, axis: int | None = None) -> list[Rule]:
        return [
            Rule(source=f"x{at}.weight", target="x", shape=shape, shard_axis=axis)
            for at, shape in enumerate(self.shapes)
        ]

    def kept(self, placement: Placement, axis: int | None = None) -> Quantised:
        pieces = list(expand(self.rules(axis), placement))
        stored = [self.storage.find(piece.source) for piece in pieces]
        assert all(stored)
        scheme = scheme_of(pieces, [one.form for one in stored if one], torch.float32)
        assert scheme is not None
        rows = sum(piece.slices[0].stop - piece.slices[0].start for piece in pieces)
        columns = pieces[0].slices[1].stop - pieces[0].slices[1].start
        found = [one for one in stored if one]
        return read_quantised(
            self.checkpoint, pieces, found, scheme, (rows, columns), CPU, Staging(CPU)
        )


@pytest.mark.parametrize("form", FORMATS)
def test_a_matrix_is_read_to_the_bit(tmp_path: Path, form: str) -> None:
    one = One(tmp_path, form, [SHAPE])
    expected = torch.from_numpy(one.values).float()
    (piece,) = expand(one.rules(), Placement())
    stored = one.storage.find(piece.source)
    assert stored is not None and not list(one.storage.faults(piece.source, SHAPE))
    for dtype in (torch.float32, torch.bfloat16):
        values = read_expanded(one.checkpoint, piece, stored, dtype)
        assert torch.equal(values, expected.to(dtype))
    assert torch.equal(one.kept(Placement()).expanded(), expected)
    assert one.kept(Placement()).scheme.nbytes(SHAPE) < 1.05 * one.checkpoint.nbytes


@pytest.mark.parametrize("form", FORMATS)
def test_stacked_matrices_keep_their_own_blocks(tmp_path: Path, form: str) -> None:
    """As of the query's, the latent's and the indexer's down-projections."""
    one = One(tmp_path, form, [(1536 // 8, 320), (576, 320), (128, 320)])
    weight = one.kept(Placement())
    assert torch.equal(weight.expanded(), torch.from_numpy(one.values).float())
    assert weight.shape == (192 + 576 + 128, 320)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_rank_reads_its_share(tmp_path: Path, form: str, axis: int) -> None:
    """Rows may be cut anywhere, columns between blocks."""
    one = One(tmp_path, form, [(320, 512)])
    parts = [one.kept(Placement(tensor=2, rank=rank), axis) for rank in (0, 1)]
    joined = torch.cat([part.expanded() for part in parts], dim=axis)
    assert torch.equal(joined, torch.from_numpy(one.values).float())
    assert all(part.shape == ((160, 512), (320, 256))[axis] for part in parts)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_columns_cut_inside_a_block_are_refused_or_expanded(tmp_path: Path, form: str) -> None:
    one, ranks = One(tmp_path, form, [(64, 320)]), 5 if form == "fp8" else 20
    placement = Placement(tensor=ranks, rank=1)
    with pytest.raises(JobError, match=r"of the 320 columns of x0.weight .* share a scale; choose"):
        one.kept(placement, axis=1)
    (piece,) = expand(one.rules(1), placement)
    stored = one.storage.find(piece.source)
    assert stored is not None
    values = read_expanded(one.checkpoint, piece, stored, torch.float32)
    assert torch.equal(values, torch.from_numpy(one.values[:, piece.slices[1]]).float())


def test_scales_of_different_dtypes_are_joined(tmp_path: Path) -> None:
    one = One(tmp_path, "fp8", [(128, 256), (256, 256)])
    tensors = load_file(tmp_path / "model.safetensors")
    made = block_fp8(random(256, 256, seed=1), ending="scale", is_e8m0=True)
    del tensors["x1.weight_scale_inv"]
    tensors |= {f"x1.{ending}": value for ending, value in made.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    one.checkpoint = Checkpoint.open(tmp_path)
    one.storage = Storage(one.checkpoint.entries, one.storage.quantisation)
    expected = torch.from_numpy(np.concatenate([one.values[:128], made.values])).float()
    assert torch.equal(one.kept(Placement()).expanded(), expected)


def ops() -> Ops:
    return kernels.load("torch")


def fails(folder: Path, *parts: str) -> None:
    """Both before loading and when loading."""
    raw = read_config(folder)
    for act in (
        lambda: check_model(folder, raw, Placement()),
        lambda: load_model(
            folder, raw, Placement(), Par.single(), ops(), torch.float32, CPU, keeps_quantised=True
        ),
    ):
        with pytest.raises(JobError) as caught:
            act()
        for part in parts:
            assert part in str(caught.value), part


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Quantised checkpoints of tiny models."""
    return {
        name: write_quantised(tmp_path_factory.mktemp(name.replace(" ", "_")), way).quantised
        for name, way in WAYS.items()
        if name in ("v3 fp8", "k2 int4", "k2 mxfp4", "v4 fp8 fp4")
    }


def spoil(folder: Path, whole: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The same with some tensors changed."""
    tensors = load_file(whole / "model.safetensors")
    change(tensors)
    save(folder, tensors, read_config(whole))
    return folder


O_PROJ = "model.layers.0.self_attn.o_proj"
EXPERT = "model.layers.1.mlp.experts.0.up_proj"
V4_EXPERT = "layers.1.ffn.experts.0.w1"


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        value = make(tensors.pop(name))
        if value is not None:
            tensors[name] = value

    return change


@pytest.mark.parametrize(
    ("way", "change", "part"),
    [
        ("v3 fp8", put(f"{O_PROJ}.weight_scale_inv", lambda _: None), "without scales"),
        ("v3 fp8", put(f"{O_PROJ}.weight", lambda _: None), "weight_scale_inv is there"),
        ("v3 fp8", put(f"{O_PROJ}.weight", lambda w: w.bfloat16()), "is BF16, though"),
        ("v3 fp8", put(f"{O_PROJ}.weight", lambda w: w[:-1].clone()), "has shape [127, 64], not"),
        (
            "v3 fp8", put(f"{O_PROJ}.weight_scale_inv", lambda s: s[:, :1].clone()),
            "has shape [3, 1], not [3, 2]",
        ),
        ("v3 fp8", put(f"{O_PROJ}.weight_scale_inv", lambda s: s.to(torch.int64)), "scales in I64"),
        ("v3 fp8", put(f"{O_PROJ}.weight", lambda w: w.view(torch.int8)), "is I8 though"),
        ("v3 fp8", put(f"{O_PROJ}.weight", lambda w: w.to(torch.int16)), "I16, which is not read"),
        ("k2 int4", put(f"{EXPERT}.weight_scale", lambda _: None), "is I32 without scales"),
        ("k2 int4", put(f"{EXPERT}.weight_packed", lambda w: w[:, 1:].clone()), "shape [64, 15]"),
        ("k2 int4", put(f"{EXPERT}.weight_scale", lambda s: s.view(torch.uint8)), "not BF16 or"),
        ("k2 int4", put(f"{EXPERT}.weight_shape", lambda s: s[:1].clone()), "not two integers"),
        ("k2 mxfp4", put(f"{EXPERT}.weight_packed", lambda w: w.view(torch.int32)), "I32, not I8"),
        ("v4 fp8 fp4", put(f"{V4_EXPERT}.scale", lambda s: s.float()), "is F32, not F8_E8M0"),
    ],
)  # fmt: skip
def test_headers_that_contradict_each_other_are_told(
    tmp_path: Path, whole: dict[str, Path], way: str, change: Callable[..., None], part: str
) -> None:
    fails(spoil(tmp_path, whole[way], change), part)


@pytest.mark.parametrize(
    ("way", "changed", "part"),
    [
        ("v3 fp8", {"quantization_config": None}, "and config.json has no quantization_config"),
        ("k2 int4", {"quantization_config": None}, "and config.json has no quantization_config"),
        ("v3 fp8", WAYS["k2 int4"].config, "though quantization_config (compressed-tensors)"),
        ("k2 int4", WAYS["v3 fp8"].config, "says matrices are in e4m3"),
        ("v4 fp8 fp4", {"expert_dtype": "fp8"}, "is I8 though quantization_config (fp8) says"),
        ("k2 int4", WAYS["k2 mxfp4"].config, "is I32, not I8 or U8"),
    ],
)
def test_a_config_that_contradicts_the_headers_is_told(
    tmp_path: Path, whole: dict[str, Path], way: str, changed: dict[str, object], part: str
) -> None:
    raw = read_config(whole[way]) | changed
    save(tmp_path, load_file(whole[way] / "model.safetensors"), raw)
    fails(tmp_path, part)


def test_a_module_named_as_plain_is_not_quantised(tmp_path: Path) -> None:
    way = WAYS["v3 fp8"]
    said = way.config["quantization_config"] | {"modules_to_not_convert": ["o_proj"]}
    folder = write_quantised(tmp_path, replace(way, config={"quantization_config": said})).quantised
    fails(folder, "o_proj.weight is F8_E4M3, though quantization_config names it as not quantised")


def test_a_config_that_promises_too_much_is_told(tmp_path: Path) -> None:
    saved = write_quantised(tmp_path, WAYS["v3 fp8"])
    tensors = load_file(saved.original / "model.safetensors")
    save(saved.quantised, tensors, read_config(saved.quantised))
    fails(saved.quantised, "has a quantization_config (fp8), but no weight is quantised")


@pytest.mark.parametrize(
    ("way", "change", "part"),
    [
        ("v3 fp8", put(f"{O_PROJ}.weight", lambda w: _with_byte(w, 0xFF)), "values that are no"),
        ("v3 fp8", put(f"{O_PROJ}.weight", lambda w: _with_byte(w, 0x7F)), "values that are no"),
        ("k2 int4", put(f"{EXPERT}.weight_shape", lambda s: s + 8), "says [72, 136], not"),
        (
            "k2 mxfp4",
            put(f"{EXPERT}.weight_scale", lambda s: _with_byte(s, 255)),
            "values that are not finite",
        ),
    ],
)
def test_values_that_are_no_numbers_are_refused_while_loading(
    tmp_path: Path, whole: dict[str, Path], way: str, change: Callable[..., None], part: str
) -> None:
    folder = spoil(tmp_path, whole[way], change)
    with pytest.raises(JobError, match=r"download") as caught:
        load_model(
            folder, read_config(folder), Placement(), Par.single(), ops(), torch.float32, CPU
        )
    assert part in str(caught.value)


def _with_byte(values: torch.Tensor, byte: int) -> torch.Tensor:
    spoilt = values.view(torch.uint8).clone()
    spoilt[3, 1] = byte
    return spoilt.view(values.dtype)


def test_e4m3_bytes_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for byte, value in enumerate(codes.tolist()):
        assert math.isnan(value) if byte & 127 == 127 else value == e4m3_value(byte)
