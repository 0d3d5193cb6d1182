"""A model on several ranks through the whole engine: the same logits as on one, and an end to
everything when a rank ends.
"""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from logits import watch_logits
from tiny import write_tiny

from batchmla.core import Completion, EngineOptions, Prompt, SamplingParams
from batchmla.engine.engine import EngineCore, load_engine, plan_engine
from batchmla.engine.hardware import detect
from batchmla.engine.source import ListSource
from batchmla.errors import DeviceError, JobError
from batchmla.weights import load as load_module
from batchmla.weights.folder import read_config

SLOW_TOKENS = 600  # of a prompt that goes on while ranks are disturbed


def make_prompts(num: int, max_tokens: int) -> list[Prompt]:
    rng = np.random.default_rng(5)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    lengths = rng.integers(1, 60, num)
    return [
        Prompt(
            row_id=str(i), index=i, sample=0, params=params, stream_key=i,
            token_ids=rng.integers(2, 256, length).astype(np.int32),
        )
        for i, length in enumerate(lengths)
    ]  # fmt: skip


def open_engine(folder: Path, tensor: int, **changes: object) -> EngineCore:
    options = {"max_batched_tokens": 64, "block_size": 16, "max_model_len": 1024} | changes
    return load_engine(
        EngineOptions(
            model=str(folder), device="cpu", dtype="float32", tensor_parallel=tensor, **options
        )  # type: ignore[arg-type]
    )


def run(
    engine: EngineCore, prompts: list[Prompt]
) -> tuple[dict[int, Completion], dict[tuple[int, int], torch.Tensor]]:
    logits = watch_logits(engine)
    found = {each.index: each for each in engine.generate(ListSource(prompts))}
    engine.close()
    return found, logits


def children() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if "spawn_main" in " ".join(each.cmdline())
    ]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("llama", 2), ("qwen3_moe", 2), ("minimax_m2", 2), ("v3", 2), ("v3", 4), ("v32", 2),
     ("v4", 2)],
)  # fmt: skip
def test_ranks_give_the_logits_of_one(tmp_path: Path, name: str, tensor: int) -> None:
    write_tiny(tmp_path, name)
    prompts = make_prompts(6, max_tokens=8)
    alone, alone_logits = run(open_engine(tmp_path, 1), prompts)
    found, logits = run(open_engine(tmp_path, tensor), prompts)
    assert not children()
    assert {i: each.token_ids.tolist() for i, each in found.items()} == {
        i: each.token_ids.tolist() for i, each in alone.items()
    }
    assert logits.keys() == alone_logits.keys()
    for place, expected_V in alone_logits.items():
        torch.testing.assert_close(logits[place], expected_V, rtol=1e-4, atol=1e-4)


def test_exact_mode_on_four_ranks_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    """A ring adds in an order that follows the shape: exact sums are made in the ranks' order."""
    write_tiny(tmp_path, "v3")
    prompts = make_prompts(5, max_tokens=6)
    together, logits = run(open_engine(tmp_path, 4, deterministic=True), prompts)
    alone, alone_logits = run(
        open_engine(tmp_path, 4, deterministic=True, max_num_seqs=1, max_batched_tokens=7), prompts
    )
    assert len(together) == len(alone) == len(prompts)
    for place, expected_V in alone_logits.items():
        assert torch.equal(logits[place], expected_V), place


def disturbed(folder: Path, signal_number: int) -> tuple[float, str]:
    """Seconds from the signal to one of two followers until the engine's error, and the error."""
    write_tiny(folder, "v3")
    engine = open_engine(folder, 4, max_model_len=1000)
    completions = engine.generate(ListSource(make_prompts(8, SLOW_TOKENS)))
    ranks = children()
    assert len(ranks) == 3
    sent_s: list[float] = []

    def strike(*_: object) -> None:
        sent_s.append(time.monotonic())
        os.kill(ranks[1].pid, signal_number)

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(DeviceError) as raised:
        list(completions)
    taken_s = time.monotonic() - sent_s[0]
    engine.close()
    assert not children(), "an orphan"
    return taken_s, str(raised.value)


def test_fc_161_a_rank_that_dies_ends_the_run(tmp_path: Path) -> None:
    taken_s, message = disturbed(tmp_path, signal.SIGKILL)
    assert taken_s < 30
    assert "rank 2 was ended by SIGKILL" in message


def test_fc_161_a_rank_that_hangs_ends_the_run(tmp_path: Path) -> None:
    taken_s, message = disturbed(tmp_path, signal.SIGSTOP)
    assert taken_s < 30
    assert "rank 2 has given no sign of life" in message


def test_a_rank_that_dies_while_rank_0_loads_ends_that_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has most of its weights to read yet, each of which takes it a while here."""
    write_tiny(tmp_path, "v3")
    filled: list[str] = []

    def slowly(_: object, target: str) -> None:
        if not filled:
            os.kill(children()[0].pid, signal.SIGKILL)
        filled.append(target)
        threading.Event().wait(0.25)

    monkeypatch.setattr(load_module._Progress, "filled", slowly)
    with pytest.raises(DeviceError, match="rank 1 was ended by SIGKILL"):
        open_engine(tmp_path, 2)
    assert len(filled) < 12, "of about 40"
    assert not children(), "an orphan"


def test_what_a_rank_finds_wrong_is_told(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    with pytest.raises(JobError, match="cannot be split over 3 devices"):
        open_engine(tmp_path, 3)
    assert not children()


@pytest.mark.parametrize(("name", "cut"), [("v3", 1), ("llama", 2)])
@pytest.mark.parametrize("tensor", [1, 2])
def test_fc_103_the_plan_counts_what_a_rank_allocates(
    tmp_path: Path, name: str, cut: int, tensor: int
) -> None:
    """Latents are whole on every rank, heads of keys and values are cut."""
    write_tiny(tmp_path, name)
    options = EngineOptions(
        model=str(tmp_path), device="cpu", dtype="float32", block_size=16, max_model_len=64,
        max_num_seqs=4, tensor_parallel=tensor,
    )  # fmt: skip
    raw = read_config(tmp_path)
    config = plan_engine(raw, options, detect("cpu"))
    if name == "v3":
        width = raw["kv_lora_rank"] + raw["qk_rope_head_dim"]
    else:
        width = 2 * raw["num_key_value_heads"] * raw["hidden_size"] // raw["num_attention_heads"]
    share = tensor if cut == 2 else 1
    assert config.layout.bytes_for(16) == 16 * raw["num_hidden_layers"] * width // share * 4
    engine = load_engine(options)
    cache = engine._runner._forward._cache
    assert config.kv_pool_bytes == sum(part.nbytes for layer in cache for part in layer.values())
    engine.close()


def test_threads_are_shared_with_ranks_and_come_back(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = open_engine(tmp_path, 2)
        assert torch.get_num_threads() == 1
        engine.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
