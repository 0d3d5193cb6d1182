"""Every auto is settled by arithmetic; what does not fit is told with numbers and a way out."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from batchmla.core import EngineOptions
from batchmla.engine.config import EngineConfig, draft, resolve
from batchmla.engine.driver import CONTEXT_BYTES
from batchmla.engine.engine import load_engine, plan_engine
from batchmla.engine.hardware import Hardware, detect, parse_hardware
from batchmla.engine.settle import settle_dtype
from batchmla.errors import DeviceError, ExitCode, JobError
from batchmla.kv.layout import KVLayout, KVPart
from batchmla.placement import Placement

GIB = 2**30
CPU = Hardware(name="Xeon", kind="cpu", memory_bytes=16 * GIB, free_bytes=16 * GIB, cores=4)
H200 = replace(parse_hardware("H200"), is_local=True)
OPTIONS = EngineOptions(model="x")


@dataclass(frozen=True)
class FakeConfig:
    num_layers: int = 30
    vocab_size: int = 49_152
    max_positions: int = 8192
    attention_kinds: tuple[str, ...] = ("gqa",) * 30
    num_heads: int = 9
    mha_row_width: int = 1152
    dtype: str = "bfloat16"


def layout_of(kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
    parts = tuple(KVPart(name=name, width=192, dtype=kv_dtype) for name in "kv")
    return KVLayout(layers=(parts,) * 30, page_tokens=page_tokens)


def settle(
    options: EngineOptions = OPTIONS, hardware: Hardware = CPU, weights_bytes: int = 280_000_000
) -> EngineConfig:
    return resolve(options, FakeConfig(), layout_of, hardware, weights_bytes)


def test_a_small_model_on_a_cpu() -> None:
    config = settle()
    assert (config.device, config.backend, config.dtype, config.kv_dtype) == (
        "cpu", "cpu", "bfloat16", "bfloat16",
    )  # fmt: skip
    assert config.max_model_len == 8192 and config.misfit is None
    assert config.layout.page_tokens == 16
    assert config.kv_capacity_tokens <= config.max_num_seqs * 8192
    memory = config.memory
    assert config.kv_pool_bytes <= memory.kv_bytes
    assert memory.total_bytes == 16 * GIB
    assert memory.reserve_bytes == pytest.approx(0.08 * 16 * GIB, rel=1e-6)


def test_pool_and_everything_else_stay_within_the_share() -> None:
    for gib in (1, 2, 5, 20, 300):
        for hardware in (CPU, H200):
            smaller = replace(hardware, memory_bytes=gib * GIB, free_bytes=gib * GIB)
            config = settle(replace(OPTIONS, max_num_seqs=32), smaller)
            memory = config.memory
            used = config.kv_pool_bytes + memory.weights_bytes + memory.workspace_bytes
            used += memory.driver_bytes
            assert (memory.driver_bytes > 0) == (hardware.kind == "cuda")
            assert used <= 0.92 * gib * GIB + 1
            assert config.num_pages >= config.layout.pages_for(config.max_model_len)
            if config.num_pages < 32 * config.layout.pages_for(8192):
                assert used > 0.85 * gib * GIB, "memory is left unused"


def test_a_context_is_counted_once_where_it_is_in_use_already() -> None:
    """Where other processes leave less than the share: what is free and the own context."""
    others = 20 * GIB
    free = H200.memory_bytes - others
    planned = settle(hardware=replace(H200, free_bytes=free))
    running = replace(H200, free_bytes=free - CONTEXT_BYTES, context_bytes=CONTEXT_BYTES)
    assert settle(hardware=running) == planned
    memory = planned.memory
    assert memory.reserve_bytes == others and memory.driver_bytes == CONTEXT_BYTES
    used = planned.kv_pool_bytes + memory.weights_bytes + memory.workspace_bytes
    assert 0 <= free - CONTEXT_BYTES - used < planned.layout.page_bytes


def test_a_misfit_on_a_gpu_names_what_the_driver_takes() -> None:
    drafted = draft(OPTIONS, FakeConfig(), layout_of, H200, 200 * GIB)
    assert drafted.misfit is not None
    assert "weights 200.00 GiB, driver 512.00 MiB, workspace " in drafted.misfit
    assert "driver" not in misfit(OPTIONS, 30 * GIB)


def test_cpu_pool_is_no_larger_than_the_sequences_can_use() -> None:
    config = settle(replace(OPTIONS, max_num_seqs=4, max_model_len=100))
    assert config.num_pages == 4 * 7


def test_context_shrinks_to_the_pool_and_says_so() -> None:
    tight = replace(CPU, free_bytes=GIB, memory_bytes=GIB)
    config = resolve(
        replace(OPTIONS, max_num_seqs=1, max_batched_tokens=64),
        replace(FakeConfig(), max_positions=10**6),
        layout_of,
        tight,
        280_000_000,
    )
    assert 1000 < config.max_model_len < 10**6
    assert config.max_model_len <= config.kv_capacity_tokens
    assert str(config.max_model_len) in config.notes[0] and "1000000" in config.notes[0]
    longer = replace(OPTIONS, max_num_seqs=1, max_batched_tokens=64)
    longer = replace(longer, max_model_len=config.max_model_len + 64)
    with pytest.raises(DeviceError, match=r"set model\.max_model_len to \d+ or less"):
        resolve(longer, replace(FakeConfig(), max_positions=10**6), layout_of, tight, 280_000_000)


def test_a_model_that_does_not_fit_is_drafted_for_plan_and_refused_for_a_run() -> None:
    drafted = draft(OPTIONS, FakeConfig(), layout_of, CPU, 30 * GIB)
    assert drafted.misfit is not None and drafted.num_pages == 0
    assert drafted.max_model_len == 8192 and drafted.memory.left_bytes < 0
    with pytest.raises(DeviceError) as caught:
        settle(weights_bytes=30 * GIB)
    assert caught.value.exit_code is ExitCode.NO_DEVICE
    assert "30.00 GiB" in str(caught.value) and "memory_utilization" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_utilization": 0.0}, "memory_utilization is 0"),
        ({"memory_utilization": 1.5}, "memory_utilization is 1.5"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"block_size": 24}, "power of two"),
        ({"max_model_len": 8193}, "only 8192 positions"),
    ],
)
def test_values_that_make_no_engine(change: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        settle(replace(OPTIONS, **change))


def test_dtype_follows_the_hardware() -> None:
    slow = replace(CPU, has_fast_bf16=False)
    half = replace(FakeConfig(), dtype="float16")
    assert settle_dtype(OPTIONS, FakeConfig(), CPU) == "bfloat16"
    assert settle_dtype(OPTIONS, half, CPU) == "bfloat16"
    assert settle_dtype(OPTIONS, FakeConfig(), slow) == "float32"
    assert settle_dtype(OPTIONS, half, H200) == "float16"
    assert settle_dtype(replace(OPTIONS, dtype="float32"), half, H200) == "float32"
    config = settle(replace(OPTIONS, dtype="float32", kv_cache_dtype="bfloat16"))
    assert (config.dtype, config.kv_dtype) == ("float32", "bfloat16")


def test_exact_pool_for_tests_still_has_to_hold_one_sequence() -> None:
    config = settle(replace(OPTIONS, kv_pool_tokens=320, max_model_len=300))
    assert config.num_pages == 20
    assert settle(replace(OPTIONS, kv_pool_tokens=320)).max_model_len == 320
    with pytest.raises(DeviceError, match="max_model_len to 320"):
        settle(replace(OPTIONS, kv_pool_tokens=320, max_model_len=321))


def test_gpu_runs_triton_kernels_and_says_what_they_have_not_done() -> None:
    config = settle(hardware=H200)
    assert config.backend == "triton"
    assert config.notes == ("Triton kernels: interpreted and compiled, never run on a GPU",)
    assert config.layout.page_tokens == 64 and config.max_num_seqs >= 256
    assert config.kv_capacity_tokens > 4_000_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_a_missing_device() -> None:
    with pytest.raises(DeviceError, match="no GPU here"):
        detect("cuda")
    with pytest.raises(DeviceError):
        load_engine(EngineOptions(model="builtin:tally", device="cuda"))


R1 = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                     "type": "yarn"},
}  # fmt: skip


def test_r1_is_planned_from_its_config_alone() -> None:
    one = plan_engine(R1, OPTIONS, parse_hardware("H200"))
    assert one.layout.token_bytes == 70_272
    assert one.layout.bytes_for(32_768) == 2_302_672_896
    assert one.misfit is not None and one.memory.weights_bytes > 1.2e12
    sixteen = plan_engine(R1, replace(OPTIONS, tensor_parallel=16), parse_hardware("16xH200"))
    assert sixteen.placement.tensor == 16 and sixteen.misfit is None
    assert sixteen.memory.weights_bytes == pytest.approx(one.memory.weights_bytes / 16, rel=0.05)
    assert sixteen.layout.token_bytes == 70_272, "latents are on every device"


def misfit(options: EngineOptions, weights_bytes: int) -> str:
    found = draft(options, FakeConfig(), layout_of, CPU, weights_bytes).misfit
    assert found is not None
    return found


def test_the_way_out_of_a_misfit_is_one_that_helps() -> None:
    small = replace(OPTIONS, memory_utilization=1e-6)
    message = misfit(small, 3_000_000)
    assert "weights 2.86 MiB" in message and "exceed the usable 16.78 KiB" in message
    assert message.endswith("; raise model.memory_utilization, or use a device with more memory")
    assert misfit(OPTIONS, 30 * GIB).endswith("0.92); use a device with more memory")
    many = misfit(replace(OPTIONS, max_num_seqs=10**6, memory_utilization=1.0), 3_000_000)
    assert "); lower engine.max_num_seqs or .max_batched_tokens, or use a dev" in many
    big = misfit(replace(OPTIONS, block_size=2**30), 3_000_000)
    assert "lower engine.block_size" in big and "max_num_seqs" not in big
