"""Field cases of damaged checkpoints: refused in one sentence that says all; `run`, `plan` and
`inspect` say the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import (
    INDEX,
    SINGLE,
    cut,
    edit_header,
    set_config,
    shard_name,
    whole,
)
from quantised import WAYS, write_quantised
from refusals import assert_told, job_on, loaded_weights
from safetensors.torch import load_file, save_file

from batchmla.errors import JobError
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


def test_fc_120_a_missing_shard_is_named_with_its_tensors(folder: Path) -> None:
    (folder / TWO).unlink()
    names = [
        n for n, f in json.loads((folder / INDEX).read_text())["weight_map"].items() if f == TWO
    ]
    assert_told(folder, f"{TWO} is missing ({len(names)} tensors: {names[0]}, ", faults=1)


def test_fc_120_without_an_index_the_shards_are_counted_by_their_names(folder: Path) -> None:
    (folder / INDEX).unlink()
    sharded = loaded_weights(folder)
    for one, other in zip(sharded, loaded_weights(whole(folder.parent / "single", 1)), strict=True):
        assert torch.equal(one, other)
    check_local_engine(job_on(folder).spec)
    lost = len([name for name in load_file(folder / TWO) if "layers.4." not in name])  # no draft
    (folder / TWO).unlink()
    assert_told(folder, f"{TWO} is missing", f"{lost - 7} more are missing", faults=1 + lost)


def test_fc_120_shards_of_two_sets_or_beyond_their_count(folder: Path) -> None:
    (folder / INDEX).unlink()
    shutil.copy(folder / ONE, folder / "model-00004-of-00003.safetensors")
    assert_told(folder, "model-00004-of-00003.safetensors is none of 00003 shards", faults=1)
    shutil.move(folder / "model-00004-of-00003.safetensors", folder / shard_name(1, 2))
    assert_told(folder, "shards of several sets (model-…-of-00002 and model-…-of-00003)")


def test_fc_121_a_shard_that_is_cut_is_named_with_its_bytes(folder: Path) -> None:
    size = (folder / TWO).stat().st_size
    cut(folder / TWO, 10)
    assert_told(folder, f"{TWO} is cut off: {size - 10} bytes of {size}", "download", faults=1)
    (folder / TWO).write_bytes((folder / TWO).read_bytes()[:100])
    header_bytes = int.from_bytes((folder / ONE).read_bytes()[:8], "little")
    assert header_bytes > 100
    assert_told(folder, f"{TWO} ends inside its header: 100 bytes of at least ", faults=1)
    (folder / TWO).write_bytes(b"")
    assert_told(folder, f"{TWO} is not a safetensors file: it is empty", faults=1)


def test_fc_121_bytes_behind_the_last_tensor_are_garbage(folder: Path) -> None:
    size = (folder / THREE).stat().st_size
    with (folder / THREE).open("ab") as file:
        file.write(b"rest of another download")
    assert_told(folder, f"{THREE} has 24 bytes behind its last tensor: {size + 24}, not {size}")


def _shift(header: dict[str, Any], by: int) -> None:
    """Moves every tensor but the first."""
    first = min(info["data_offsets"][0] for name, info in header.items() if name[0] != "_")
    for name, info in header.items():
        if name[0] != "_" and info["data_offsets"][0] != first:
            info["data_offsets"] = [each + by for each in info["data_offsets"]]


def test_fc_121_holes_and_overlaps_are_told(folder: Path) -> None:
    edit_header(folder / ONE, lambda header: _shift(header, 6))
    with (folder / ONE).open("ab") as file:
        file.write(bytes(6))
    assert_told(folder, f"{ONE}: 6 bytes between ", " are no tensor's", faults=1)
    edit_header(folder / ONE, lambda header: _shift(header, -14))
    cut(folder / ONE, 14)
    assert_told(folder, f"{ONE}: ", " overlap by 8 bytes", faults=1)


O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def edit_tensors(folder: Path, keeps: Callable[[str], bool]) -> None:
    """Takes tensors away."""
    tensors = {name: each for name, each in load_file(folder / SINGLE).items() if keeps(name)}
    save_file(tensors, folder / SINGLE)


def test_fc_123_fp8_without_scales_or_without_its_config_is_told_from_the_headers(
    tmp_path: Path,
) -> None:
    folder = write_quantised(tmp_path, WAYS["v3 fp8"]).quantised
    check_local_engine(job_on(folder).spec)
    count = sum(each.dtype is torch.float8_e4m3fn for each in load_file(folder / SINGLE).values())
    raw = json.loads((folder / "config.json").read_text())
    section = raw.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(raw))
    assert_told(
        folder,
        "weight is F8_E4M3, and config.json has no quantization_config",
        f"{count - 8} more are quantised otherwise",
        faults=count,
    )
    set_config(folder, quantization_config=section)
    scale = O_PROJ + "_scale_inv"
    edit_tensors(folder, lambda name: name != scale)
    assert_told(folder, f"{O_PROJ} is F8_E4M3 without scales: {scale} ", faults=1)
    edit_tensors(folder, lambda name: not name.endswith("_scale_inv"))
    assert_told(folder, "is F8_E4M3 without scales: ", faults=count)


def test_fc_123_a_config_of_fp8_beside_plain_weights_is_told(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, WAYS["v3 fp8"]).expanded
    check_local_engine(job_on(folder).spec)
    set_config(folder, **WAYS["v3 fp8"].config)
    assert_told(folder, "has a quantization_config (fp8), but no weight is quantised", faults=1)


def test_fc_123_a_method_that_cannot_be_computed_is_refused_by_name(folder: Path) -> None:
    for method in ("gptq", "awq", "bitsandbytes"):
        set_config(folder, quantization_config={"quant_method": method, "bits": 4})
        for call in (check_local_engine, lambda spec: plan_job(job_on(folder))):
            with pytest.raises(JobError, match=f"the quant_method {method} cannot be computed"):
                call(job_on(folder).spec)
