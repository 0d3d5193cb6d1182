"""The whole engine on the kernels of GPUs, interpreted: the greedy ids of the CPU's path."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fakes import ListSource, make_prompt
from tiny import write_tiny

from batchmla import kernels
from batchmla.core import EngineOptions, SamplingParams
from batchmla.engine import build
from batchmla.engine.engine import load_engine
from batchmla.kernels.ops import Ops
from batchmla.kernels.triton.spans import DeviceTables
from batchmla.text.tokenizer import Tokenizer
from batchmla.weights.folder import find_model

load_kernels = kernels.load  # while tests put another in its place
ROWS = {"auto": ("Count the red: red blue red", "zinc"), "fp8": ("7 +",)}


def load_for_gpus(_: str, *, exact: bool = False) -> Ops:
    return load_kernels("triton", exact=exact)


def greedy(model: str, prompts: list[list[int]], options: dict[str, object]) -> list[list[int]]:
    """The ids that follow each prompt."""
    engine = load_engine(
        EngineOptions(model=model, device="cpu", dtype="float32", max_model_len=128, **options)
    )
    params = SamplingParams(temperature=0.0, max_tokens=2)
    source = ListSource([make_prompt(i, ids, params) for i, ids in enumerate(prompts)])
    found = {done.index: done.token_ids for done in engine.generate(source)}
    engine.close()
    return [list(map(int, found[index])) for index in range(len(prompts))]


def both(
    model: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, **options: object
) -> tuple[list[list[int]], list[list[int]]]:
    """By the CPU's path, and by the kernels of GPUs."""
    expected = greedy(model, prompts, options)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "load", load_for_gpus)
        return expected, greedy(model, prompts, options)


@pytest.mark.parametrize("kv_cache_dtype", ROWS)
def test_tally(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside single tokens, in both forms of latent attention."""
    tokenizer = Tokenizer.load(find_model("builtin:tally"))
    prompts = [tokenizer.encode(text).tolist() for text in ROWS[kv_cache_dtype]]
    expected, actual = both(
        "builtin:tally", prompts, monkeypatch,
        max_batched_tokens=8, block_size=16, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    assert actual == expected
    assert all(len(ids) == 2 for ids in actual)


def test_grouped_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, "llama_tied")
    prompts = [list(range(2, 2 + count)) for count in (5, 41)]
    expected, actual = both(str(tmp_path), prompts, monkeypatch, block_size=16)
    assert actual == expected


class Repeater:
    """A device whose recordings are the calls themselves; what they may not do is noticed."""

    def __init__(self) -> None:
        self.num_replayed = 0

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        filled = run()

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DeviceTables, "__init__", _no_new_tables)
                filled.copy_(run())
            return filled

        return replay


def _no_new_tables(*_: object, **__: object) -> None:
    raise AssertionError("a recording would not make tables again")


@pytest.mark.parametrize("family", ["llama_tied", "v3"])
def test_recorded_steps(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps from tables that stay where they are, for rows that come and go."""
    write_tiny(tmp_path, family)
    prompts = [list(range(2, 2 + count)) for count in (5, 41, 17)]
    device = Repeater()
    monkeypatch.setattr(build, "_is_recorded", lambda config, model: model.can_record)
    monkeypatch.setattr(build, "CudaRecorder", lambda: device)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_is_recorded", lambda config, model: False)
        expected = greedy(str(tmp_path), prompts, {"block_size": 16})
    monkeypatch.setattr(kernels, "load", load_for_gpus)
    assert greedy(str(tmp_path), prompts, {"block_size": 16}) == expected
    assert device.num_replayed >= 2
