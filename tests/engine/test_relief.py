"""Steps that run out of memory: smaller ones follow, and every row ends as if nothing had been."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import ListSource, greedy_ids, make_prompt
from tiny import write_tiny
from watched import WatchedEngine, run

from batchmla.core import EngineOptions, SamplingParams
from batchmla.engine.engine import EngineCore, load_engine
from batchmla.engine.group import Limits
from batchmla.engine.relief import CALM_STEPS, LEAST_TOKENS, Relief
from batchmla.kv.step import Step

LIMITS = Limits(max_model_len=400, max_num_seqs=32, max_batched_tokens=256)
ROOM = {"num_pages": 400, "max_model_len": 96, "max_num_seqs": 16, "max_batched_tokens": 128}


def cuda_error() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def cpu_error() -> Exception:
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    )


def step_needs(tokens: int, sequences: int) -> Callable[[Step], bool]:
    """Whether a step takes more memory than there is."""

    def is_too_much(step: Step) -> bool:
        return len(step.tokens_T) > tokens or step.num_sequences > sequences

    return is_too_much


class Narrow(WatchedEngine):
    """An engine on a device with too little memory for some steps."""

    def __init__(
        self, is_too_much: Callable[[Step], bool], error: Callable[[], Exception], **limits: Any
    ) -> None:
        super().__init__(**limits)
        self.is_too_much, self.error, self.num_errors = is_too_much, error, 0

    def before_step(self, step: Step) -> None:
        super().before_step(step)
        if self.is_too_much(step):
            self.num_errors += 1
            raise self.error()


def rows(count: int = 20) -> list[Any]:
    rng = np.random.default_rng(4)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return [
        make_prompt(n, rng.integers(0, 97, rng.integers(1, 60)).tolist(), params)
        for n in range(count)
    ]


@pytest.mark.parametrize("error", [cuda_error, cpu_error, MemoryError])
@pytest.mark.parametrize("bounds", [(40, 16), (128, 5), (20, 3), (16, 1)])
def test_every_row_ends_with_the_same_ids(
    error: Callable[[], Exception], bounds: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Narrow(step_needs(*bounds), error, **ROOM)
    prompts = rows()
    with caplog.at_level("WARNING"):
        found = run(engine, prompts)
    for prompt in prompts:
        assert found[prompt.index].token_ids.tolist() == greedy_ids(prompt.token_ids, 12)
    stats = engine.stats()
    assert stats.step_downs == engine.num_errors > 0
    lines = [record.getMessage() for record in caplog.records if "out of memory" in record.message]
    assert len(lines) == stats.step_downs, "one line for each"
    assert stats.running == stats.waiting == 0 and stats.used_pages == 0


def test_a_row_that_is_too_much_by_itself_fails_alone() -> None:
    prompts = rows(8)
    prompts[3] = make_prompt(3, [5] * 61, SamplingParams(temperature=0.0, max_tokens=12))

    def holds_the_row(step: Step) -> bool:
        return bool((step.tokens_T == 5).sum() > 8)

    engine = Narrow(holds_the_row, cpu_error, **ROOM)
    found = run(engine, prompts)
    error = found[3].error or ""
    assert error.startswith("row 3: the device ran out of memory in a step of ")
    assert error.endswith("engine.max_num_seqs or model.memory_utilization")
    for prompt in prompts[:3] + prompts[4:]:
        assert found[prompt.index].token_ids.tolist() == greedy_ids(prompt.token_ids, 12)


def test_other_faults_end_the_run() -> None:
    engine = Narrow(step_needs(40, 16), lambda: RuntimeError("illegal memory access"), **ROOM)
    with pytest.raises(RuntimeError, match="illegal"):
        run(engine, rows())


def test_limits_come_back_slowly_and_more_slowly_after_a_relapse() -> None:
    relief = Relief(LIMITS)
    assert not relief.is_in_force and not relief.step_done()
    assert relief.step_down(num_seqs=32, num_tokens=256, num_running=32)
    assert (relief.most_seqs, relief.most_tokens) == (16, 128) and relief.is_in_force
    assert [relief.step_done() for _ in range(CALM_STEPS)] == [False] * (CALM_STEPS - 1) + [True]
    assert (relief.most_seqs, relief.most_tokens) == (32, 256)
    assert relief.step_down(num_seqs=32, num_tokens=256, num_running=32)
    assert not any(relief.step_done() for _ in range(2 * CALM_STEPS - 1)) and relief.step_done()
    assert relief.step_downs == 2


def test_stepping_down_ends_at_one_sequence_and_a_small_chunk() -> None:
    relief = Relief(LIMITS)
    seqs, tokens, count = 32, 256, 0
    while relief.step_down(seqs, tokens, seqs):
        seqs, tokens, count = relief.most_seqs, relief.most_tokens, count + 1
        assert count < 12
    assert (seqs, tokens) == (1, LEAST_TOKENS)


def exact_ids(folder: Path, failing: set[int]) -> tuple[list[list[int]], EngineCore]:
    """Ids by row, on an engine whose forward passes with these numbers fail half-way."""
    options = EngineOptions(
        model=str(folder), device="cpu", dtype="float32", deterministic=True, max_num_seqs=8,
        max_batched_tokens=64, block_size=8, kv_pool_tokens=2048, max_model_len=128,
    )  # fmt: skip
    engine = load_engine(options)
    model, calls = engine._runner._forward._model, 0  # type: ignore[attr-defined]
    plain = model.layers[-1].ffn.forward

    def last_layer(x_TM: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in failing:
            raise cpu_error()
        out: torch.Tensor = plain(x_TM, *more)
        return out

    model.layers[-1].ffn.forward = last_layer
    rng = np.random.default_rng(8)
    prefix = rng.integers(2, 256, 40).tolist()
    params = SamplingParams(temperature=0.9, max_tokens=10)
    prompts = [
        make_prompt(n, prefix[: 40 * (n % 2)] + rng.integers(2, 256, 5 + n).tolist(), params,
                    stream_key=n)
        for n in range(12)
    ]  # fmt: skip
    found = {each.index: each for each in engine.generate(ListSource(prompts))}
    assert all(each.error is None for each in found.values())
    return [found[n].token_ids.tolist() for n in range(12)], engine


@pytest.mark.parametrize("name", ["v3", "v4", "kimi_linear"])
def test_ids_in_exact_mode_stay_when_passes_fail_half_way(name: str, tmp_path: Path) -> None:
    """In the last layer: the cache, and the state in lanes, hold what the others wrote."""
    write_tiny(tmp_path, name)
    want, calm = exact_ids(tmp_path, set())
    assert calm.stats().step_downs == 0
    got, engine = exact_ids(tmp_path, {2, 9})
    assert engine.stats().step_downs == 2
    assert got == want
