"""A checkpoint of 685 GB is checked in seconds; only small tensors are read."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import shard_name, shard_of
from published import DEEPSEEK_R1
from safetensors.torch import load_file, save_file
from sparse import write_sparse
from tiny import TINY, read_config, write_tiny

from batchmla.errors import JobError
from batchmla.models.load import check_model
from batchmla.placement import Placement
from batchmla.weights.checkpoint import Checkpoint
from batchmla.weights.faults import Faults
from batchmla.weights.header import parse_header, read_start
from batchmla.weights.integrity_values import TINY_BYTES, check_values
from batchmla.weights.rules import Rule, Skip

SHARDS = 163
MOST_S = 5.0
SCALE = "model.layers.7.mlp.experts.11.up_proj.weight_scale_inv"
BIAS = "model.layers.60.mlp.gate.e_score_correction_bias"
DRAFT = "model.layers.61.mlp.experts.11.up_proj.weight_scale_inv"


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse") / "r1"
    num_tensors, num_bytes = write_sparse(folder, DEEPSEEK_R1, SHARDS)
    assert num_tensors == 91_985 and 684e9 < num_bytes < 686e9
    held_bytes = sum(512 * path.stat().st_blocks for path in folder.iterdir())
    assert held_bytes < 64 * 2**20
    return folder


def put(folder: Path, name: str, at: int, value: float) -> Callable[[], None]:
    """Overwrites a float32 of a tensor; the result puts the old one back."""
    path = shard_of(folder, name)
    entries = parse_header(read_start(path)).entries
    assert entries is not None
    place = entries[name].start + 4 * at
    with path.open("r+b") as file:
        old = os.pread(file.fileno(), 4, place)
        os.pwrite(file.fileno(), np.float32(value).tobytes(), place)

    def undo() -> None:
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), old, place)

    return undo


def test_hundreds_of_gigabytes_are_checked_in_seconds(r1: Path) -> None:
    start_s = time.process_time()
    check_model(r1, DEEPSEEK_R1, Placement())
    assert time.process_time() - start_s < MOST_S


def test_its_faults_are_told_in_seconds_too(r1: Path) -> None:
    undo = [put(r1, SCALE, 5, np.nan), put(r1, BIAS, 3, np.inf), put(r1, DRAFT, 0, np.nan)]
    first, last = r1 / shard_name(1, SHARDS), r1 / shard_name(SHARDS, SHARDS)
    size = first.stat().st_size
    os.truncate(first, size - 1)
    last.rename(r1 / "elsewhere")
    start_s = time.process_time()
    with pytest.raises(JobError) as caught:
        check_model(r1, DEEPSEEK_R1, Placement())
    assert time.process_time() - start_s < MOST_S
    os.truncate(first, size)
    (r1 / "elsewhere").rename(last)
    for one in undo:
        one()
    told = str(caught.value)
    assert "(4 faults)" in told, "draft layers are not used, nor looked at"
    for words in (
        f"{first.name} is cut off: {size - 1} bytes of {size}",
        f"{last.name} is missing (",
        f"{SCALE} holds 1 of 896 values that are not finite",
        f"{BIAS} holds 1 of 256 values that are not finite",
    ):
        assert words in told, told


@pytest.mark.parametrize("name", TINY)
def test_every_vector_of_every_family_is_looked_at(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path, name)
    raw, weights = read_config(tmp_path), tmp_path / "model.safetensors"
    check_model(tmp_path, raw, Placement())
    tensors = load_file(weights)
    vectors = [each for each in tensors.values() if each.dim() == 1 and each.is_floating_point()]
    assert len(vectors) >= 5
    for vector in vectors:
        vector[-1] = torch.nan
    save_file(tensors, weights)
    with pytest.raises(JobError, match=rf"\({len(vectors)} faults\): .* that are not finite"):
        check_model(tmp_path, raw, Placement())


def small_checkpoint(folder: Path, **tensors: torch.Tensor) -> tuple[Checkpoint, Faults]:
    save_file(tensors, folder / "model.safetensors")
    faults = Faults(folder)
    return Checkpoint.survey(folder, faults), faults


def count_faults(folder: Path, name: str, tensor: torch.Tensor, **rule: bool) -> int:
    checkpoint, faults = small_checkpoint(folder, **{name: tensor})
    rules = [Rule(source="x.norm", target="norm.weight", shape=(4,), **rule)]
    check_values(checkpoint, rules, faults)
    return faults.count


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_every_value_that_is_not_finite_is_seen(tmp_path: Path, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    fine = torch.tensor([largest, -largest, torch.finfo(dtype).tiny, 0], dtype=dtype)
    assert count_faults(tmp_path, "x.norm", fine) == 0
    assert count_faults(tmp_path, "x.weight_scale_inv", fine) == 0
    for value in (torch.nan, torch.inf, -torch.inf):
        for place in range(4):
            bad = fine.clone()
            bad[place] = value
            assert count_faults(tmp_path, "x.norm", bad) == 1
            assert count_faults(tmp_path, "x.weight_scale_inv", bad) == 1


@pytest.mark.parametrize("name", ["x.scale", "x.weight_scale"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_an_exponent_of_255_is_no_number(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    fine = torch.tensor([[0, 127, 254]], dtype=torch.uint8)
    assert count_faults(tmp_path, name, fine.view(dtype)) == 0
    fine[0, 1] = 255
    assert count_faults(tmp_path, name, fine.view(dtype)) == 1


def test_a_norm_of_zeros_is_a_fault_unless_it_may_be_zero(tmp_path: Path) -> None:
    zeros = torch.tensor([0.0, -0.0, 0.0, 0.0])
    assert count_faults(tmp_path, "x.norm", zeros) == 1
    assert count_faults(tmp_path, "x.norm", zeros, may_be_zero=True) == 0
    assert count_faults(tmp_path, "x.norm", zeros + 1e-40) == 0  # a denormal is no zero
    assert count_faults(tmp_path, "x.scale", zeros) == 0


def test_large_and_skipped_tensors_are_not_looked_at(tmp_path: Path) -> None:
    bad = torch.full((TINY_BYTES // 4 + 1,), torch.nan)
    assert count_faults(tmp_path, "x.scale", bad) == 0
    assert count_faults(tmp_path, "x.scale", bad[1:]) == 1
    checkpoint, faults = small_checkpoint(tmp_path, **{"draft.scale": bad[1:]})
    check_values(checkpoint, [Skip(pattern=r"draft\..*", reason="not used")], faults)
    assert faults.count == 0


def test_neighbours_are_read_together_and_told_apart(tmp_path: Path) -> None:
    tensors = {f"x{n}.scale": torch.full((n + 1,), float(n)) for n in range(300)}
    for n in (0, 150, 299):
        tensors[f"x{n}.scale"][-1] = torch.nan
    checkpoint, faults = small_checkpoint(tmp_path, **tensors)
    check_values(checkpoint, [], faults)
    with pytest.raises(JobError) as caught:
        faults.refuse()
    for n in (0, 150, 299):
        assert f"x{n}.scale holds 1 of {n + 1} values" in str(caught.value)
    assert faults.count == 3


def test_a_way_out_that_another_holds_is_given_once(tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    faults.refuse()
    faults.add("worse", [f"fault {n}" for n in range(1234)], "do this")
    faults.add("missing", ["x is missing"], "do this, and that")
    faults.add("far", ["y is far"], "go")
    with pytest.raises(JobError) as caught:
        faults.refuse()
    told = str(caught.value)
    assert "(1,236 faults): fault 0; " in told and "; 1,226 more are worse; x is missing; " in told
    assert told.endswith("y is far: do this, and that, or go")
    assert json.dumps(told).count("fault 7") == 1 and "fault 8" not in told
