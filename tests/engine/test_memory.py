"""What is measured of memory: what was taken since the start, not before it."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import FakeModel, ListSource, fake_layout, make_prompt
from tiny import write_tiny

from batchmla.core import EngineOptions, SamplingParams
from batchmla.engine import build
from batchmla.engine.engine import load_engine
from batchmla.engine.forward import Forward
from batchmla.engine.memory import PeakMemory
from batchmla.errors import DeviceError
from batchmla.kernels.cpu.heap import keep_freed

CPU = torch.device("cpu")
MIB = 2**20


def test_the_peak_is_kept_and_what_was_taken_before_is_not_counted() -> None:
    before = np.ones(64 * MIB, np.uint8)
    memory = PeakMemory(CPU)
    assert memory.peak_bytes() < 32 * MIB, "memory from before the start counts"
    taken = np.ones(96 * MIB, np.uint8)
    assert taken.nbytes + before.nbytes > memory.peak_bytes() >= 90 * MIB
    del taken
    assert memory.peak_bytes() >= 90 * MIB
    memory.restart()
    assert memory.peak_bytes() < 64 * MIB


def test_what_the_process_keeps_of_freed_memory_hides_nothing() -> None:
    assert keep_freed() or not sys.platform.startswith("linux")
    freed = [torch.ones(5 * MIB) for _ in range(6)]  # blocks that stay with the process
    del freed
    memory = PeakMemory(CPU)
    taken = np.ones(96 * MIB, np.uint8)
    assert memory.peak_bytes() >= 90 * MIB, taken.nbytes


def test_marks_are_read_where_the_system_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t  900 kB\nVmRSS:\t  500 kB\n")
    memory = PeakMemory(CPU, tmp_path)
    assert memory.peak_bytes() == 400 * 1024
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_without_marks_the_whole_life_counts(tmp_path: Path) -> None:
    assert PeakMemory(CPU, tmp_path / "none").peak_bytes() > 10 * MIB


def test_an_engine_tells_what_it_took(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    engine = load_engine(EngineOptions(model=str(tmp_path), device="cpu", max_model_len=64))
    prompt = make_prompt(0, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))
    assert all(each.error is None for each in engine.generate(ListSource([prompt])))
    assert 0 < engine.stats().peak_bytes < 2**31
    engine.close()


def test_a_pool_beyond_all_memory_is_told() -> None:
    with pytest.raises(DeviceError, match=r"the KV pool of \d+ bytes could not be allocated"):
        Forward(FakeModel(), fake_layout(), 1 << 50, 1, CPU)


@pytest.mark.parametrize(
    "error", [MemoryError("8 bytes"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_weights_that_find_no_memory_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    write_tiny(tmp_path, "llama")
    monkeypatch.setattr(build, "load_model", load)
    options = EngineOptions(model=str(tmp_path), device="cpu", max_model_len=64, max_num_seqs=2)
    with pytest.raises(DeviceError, match=f"memory ran out while the weights of {tmp_path} were"):
        load_engine(options)
