"""What `plan` says of placements, capacity and time, and what a run leaves for the next plan."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published import DEEPSEEK_R1
from rich.console import Console

from batchmla import kernels
from batchmla.core import EngineOptions
from batchmla.engine.build import RankPlan
from batchmla.engine.config import resolve
from batchmla.engine.drafts import engine_facts
from batchmla.engine.driver import driver_bytes
from batchmla.engine.hardware import detect, parse_hardware
from batchmla.errors import JobError
from batchmla.jobs.counts import _cap_for_mean
from batchmla.jobs.plan import Plan, plan_job
from batchmla.jobs.plan_view import print_plan, vllm_lines
from batchmla.jobs.run import run_job
from batchmla.jobs.spec import LoadedSpec, build_spec
from batchmla.jobs.summary import read_summary
from batchmla.models.load import count_model


def job(path: str, folder: Path, rows: int = 3, **changes: Any) -> LoadedSpec:
    source = folder / "in.jsonl"
    text = "one two three " * 12
    source.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(rows)))
    sections: dict[str, Any] = {
        "model": {"path": path},
        "input": {"path": str(source)},
        "prompt": {"user": "{{ text }}"},
        "output": {"path": str(folder / "out")},
    }
    for name, section in changes.items():
        sections[name] = sections.get(name, {}) | section
    return build_spec(sections)


@pytest.fixture(scope="module")
def r1_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("r1")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_R1))
    return str(folder)


@pytest.fixture(scope="module")
def r1(r1_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan_job(job(r1_folder, tmp_path_factory.mktemp("job")), "8xH200")


def shown(plan: Plan, width: int = 110) -> str:
    console = Console(width=width, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_plan(plan, console)
    return console.export_text()


def test_a_machine_that_is_planned_for_is_used_as_recommended(r1: Plan) -> None:
    assert r1.placement == {"tensor": 1, "expert": 8, "attention_data": 8}
    assert r1.recommended is not None
    assert {name: r1.recommended[name] for name in r1.placement} == r1.placement
    (chosen,) = [each for each in r1.placements if r1.placement.items() <= each.items()]
    parts = ("weights_bytes", "workspace_bytes", "driver_bytes", "kv_pool_bytes")
    for name in (*parts, "kv_capacity_tokens"):
        assert getattr(r1, name) == chosen[name]
    taken = sum(chosen[name] for name in parts)
    assert 0 <= r1.memory_bytes - r1.reserve_bytes - taken < 2 * 64 * r1.kv_bytes_per_token
    assert r1.recommended["driver_bytes"] == r1.driver_bytes
    assert r1.recommended["max_batched_tokens"] == r1.max_batched_tokens == 2048
    assert r1.recommended["max_num_seqs"] <= r1.max_num_seqs
    assert r1.recommended["kv_cache_dtype"] == "bfloat16" and r1.recommended["block_size"] == 64
    assert any("model.parallel is not set" in note for note in r1.notes)
    tensor = next(each for each in r1.placements if each["tensor"] == 8 and each["expert"] == 1)
    assert tensor["kv_capacity_tokens"] == pytest.approx(0.65e6, rel=0.02)
    assert r1.kv_capacity_tokens == pytest.approx(4.0e6, rel=0.02)
    reason = r1.recommended["reason"]
    assert f"{tensor['kv_capacity_tokens']:,}" in reason and reason.count(".") <= 2
    assert json.loads(json.dumps(r1.to_json(), allow_nan=False)) == r1.to_json()


@pytest.mark.parametrize("sizes", [(1, 8, 8), (8, 1, 1)])
def test_the_engine_s_ranks_have_the_pool_that_is_planned(
    r1: Plan, sizes: tuple[int, int, int]
) -> None:
    """Of the configuration that every rank is built from: what its own share of the weights, the
    driver and the largest step leave of its device."""
    tensor, expert, groups = sizes
    names = ("tensor", "expert", "attention_data")
    (planned,) = [each for each in r1.placements if tuple(each[name] for name in names) == sizes]
    options = EngineOptions(
        model="x", tensor_parallel=tensor, expert_parallel=expert, attention_data=groups
    )
    hardware = parse_hardware("8xH200")
    config = resolve(*engine_facts(DEEPSEEK_R1, options, hardware))
    assert config.kv_capacity_tokens == planned["kv_capacity_tokens"]
    first = RankPlan(config=config, folder=Path("x"), raw_config=DEEPSEEK_R1)
    ops = kernels.load_counting(config.backend)
    for rank in (0, 5, 7):
        own = first.of_rank(rank).config
        assert own.placement.rank == rank and own.placement.common(129_280) == groups
        weights_bytes = count_model(
            DEEPSEEK_R1, own.placement, ops, torch.bfloat16, keeps_quantised=True
        ).weights_bytes
        memory = own.memory
        assert weights_bytes == memory.weights_bytes == planned["weights_bytes"]
        assert memory.driver_bytes == driver_bytes(own.placement) == planned["driver_bytes"]
        left = 0.92 * hardware.memory_bytes - weights_bytes - memory.workspace_bytes
        tokens = groups * (left - memory.driver_bytes) / own.layout.token_bytes
        assert tokens == pytest.approx(planned["kv_capacity_tokens"], rel=1e-3)


def test_capacity_as_vllm_logs_it_is_that_of_one_group(r1: Plan) -> None:
    size, concurrency = vllm_lines(r1)
    many = r1.kv_capacity_tokens / 8 / r1.max_model_len
    assert concurrency.startswith(
        f"Maximum concurrency for 163,840 tokens per request: {many:.2f}x"
    )
    assert size.startswith("GPU KV cache size: ") and "each of 8 attention groups" in size
    tokens = int(size.split(": ")[1].split(" ")[0].replace(",", ""))
    assert tokens == pytest.approx(r1.kv_capacity_tokens / 8, rel=0.01)
    assert r1.max_concurrency["163840"] == pytest.approx(8 * many, abs=0.05)


def test_a_person_sees_every_placement_and_the_choice(r1: Plan) -> None:
    text = shown(r1)
    for each in r1.placements:
        assert "/".join(str(each[n]) for n in ("tensor", "expert", "attention_data")) in text
    narrow = shown(r1, width=80)
    assert "…" not in narrow and f"{r1.kv_capacity_tokens:,} " in narrow
    choice = "recommended: model.parallel {tensor: 1, expert: 8, attention_data: 8}"
    capacity = f"{r1.kv_capacity_tokens:,}"
    for words in ("no room", choice, capacity, "GPU KV cache size", "driver and NCCL (estimate)"):
        assert words in text
    assert "…" not in text, "a column is cut"


def test_small_steps_on_a_gpu_are_warned_of(r1_folder: str, r1: Plan, tmp_path: Path) -> None:
    """What counts is a step of all attention groups."""
    small = plan_job(job(r1_folder, tmp_path, engine={"max_batched_tokens": 511}), "8xH200")
    words = "engine.max_batched_tokens 511 in each of 8 attention groups is small for a GPU"
    (note,) = [note for note in small.notes if words in note]
    assert note.endswith("set it to 512 or more")
    assert not any("is small for a GPU" in note for note in r1.notes)


def test_a_named_placement_is_planned_as_it_is(r1_folder: str, tmp_path: Path) -> None:
    parallel = {"parallel": {"tensor": 8}}
    plan = plan_job(job(r1_folder, tmp_path, model=parallel), "8xH200")
    assert plan.placement == {"tensor": 8, "expert": 1, "attention_data": 1}
    assert plan.recommended is not None and plan.recommended["attention_data"] == 8


def test_devices_that_talk_take_time_for_it(tmp_path: Path) -> None:
    sampling = {"sampling": {"max_tokens": 20, "ignore_eos": True}}
    parallel = {"parallel": {"tensor": 4}}
    one = plan_job(job("builtin:tally", tmp_path, **sampling), "H100")
    four = plan_job(job("builtin:tally", tmp_path, model=parallel, **sampling), "4xH100")
    assert one.predicted_exchange_seconds == 0.0 and not one.is_calibrated
    assert four.predicted_exchange_seconds is not None and four.predicted_seconds is not None
    assert 0 < four.predicted_exchange_seconds < four.predicted_seconds
    assert any("bound from the data sheet" in note for note in four.notes)


def test_auto_is_one_rank_of_a_processor(tmp_path: Path) -> None:
    auto = {"parallel": "auto", "device": "cpu"}
    plan = plan_job(job("builtin:tally", tmp_path, model=auto))
    assert plan.placement == {"tensor": 1, "expert": 1, "attention_data": 1}
    assert len(plan.placements) == 1 and plan.recommended is not None
    assert "one rank has all of the processor" in plan.recommended["reason"]


def test_a_run_leaves_its_memory_and_times_for_the_next_plan(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": {"device": "cpu"},
        "sampling": {"max_tokens": 24, "ignore_eos": True},
    }
    loaded = job("builtin:tally", tmp_path, rows=40, **options)
    before = plan_job(loaded)
    assert not before.is_calibrated
    assert run_job(loaded, progress="off").exit_code == 0
    summary = read_summary(tmp_path / "out")
    assert summary is not None and summary.step_downs == 0
    estimated = summary.memory["estimated"]
    assert estimated["weights"] == before.weights_bytes
    assert estimated["total"] == sum(estimated[n] for n in ("weights", "workspace", "kv_pool"))
    assert 0 < summary.memory["measured"] < 4 * estimated["total"]
    after = plan_job(loaded)
    assert after.is_calibrated and after.predicted_seconds is not None
    assert after.predicted_output_tokens == 40 * 24
    assert after.predicted_seconds == pytest.approx(summary.engine_seconds, rel=0.2)
    assert "was measured" in " ".join(after.notes)
    other = job("builtin:tally", tmp_path, rows=40, **options | {
        "model": {"device": "cpu", "dtype": "float32"}
    })  # fmt: skip
    assert not plan_job(other).is_calibrated, "times of another dtype"


def test_calibration_is_of_this_machine(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="leave --hardware out"):
        plan_job(job("builtin:tally", tmp_path), "H100", calibrates=True)
    assert detect("cpu").is_local


def test_lengths_are_cut_to_the_mean_that_a_run_had() -> None:
    lengths = np.array([10, 20, 400, 800])
    assert np.minimum(lengths, _cap_for_mean(lengths, 50.0)).mean() == pytest.approx(50, abs=0.5)
    assert _cap_for_mean(lengths, lengths.mean()) == 800, "as long as they may be"
    assert _cap_for_mean(lengths, 0.0) == 1
