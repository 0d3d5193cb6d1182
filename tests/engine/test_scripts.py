"""Steps that run from scripts, through the whole engine: the same bits as without, whatever happens
on the way."""

import gc
import threading
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_rows import preempt_often
from fakes import ListSource, make_prompt
from quantised import WAYS, write_quantised
from tiny import write_tiny

from batchmla import kernels
from batchmla.core import Completion, EngineOptions, Prompt, SamplingParams
from batchmla.engine.engine import EngineCore, load_engine
from batchmla.engine.sampler import Draw
from batchmla.engine.sequence import Sequence
from batchmla.kernels.cpu.native.script import Script

NEW_TOKENS = 6
LENGTHS = (1, 33, 1, 64, 130, 17, 2, 65, 31)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_tied": {},
    "qwen2": {},
    "minimax_m2": {},
    "v3_wide": {"q_lora_rank": None},
}
CHANGES: tuple[dict[str, Any], ...] = (
    {"max_batched_tokens": 1},
    {"max_batched_tokens": 40, "preempts": True},
    {"max_num_seqs": 3, "prefix_caching": False, "preempts": True},
)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if kernels.load("cpu").write_script is None:
        pytest.skip(kernels.load("cpu").name)
    made = tmp_path_factory.mktemp(request.param)
    write_tiny(made, request.param, **FAMILIES[request.param])
    return made


def make_prompts(seed: int = 3) -> list[Prompt]:
    """Half of them begin alike; some are greedy, some drawn, some want to know of their prompt."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(2, 256, 40).tolist()
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
        SamplingParams(
            temperature=1.0, max_tokens=NEW_TOKENS, min_tokens=2, stop_ids=frozenset({5, 9})
        ),
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, prompt_logprobs=2),
    )
    texts = [rng.integers(2, 256, length).tolist() for length in LENGTHS]
    texts[1::2] = [prefix + ids for ids in texts[1::2]]
    return [make_prompt(index, ids, kinds[index % 3]) for index, ids in enumerate(texts)]


def load(folder: Path, **options: Any) -> EngineCore:
    chosen: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16} | options
    return load_engine(EngineOptions(model=str(folder), device="cpu", **chosen))


def model_of(engine: EngineCore) -> Any:
    return engine._runner._forward._model  # type: ignore[attr-defined]


class Watched:
    """An engine's completions by row, and the logits of every draw."""

    def __init__(self, engine: EngineCore, *, preempts: bool = False) -> None:
        self.engine = engine
        self.logits: list[tuple[list[int], torch.Tensor]] = []
        self.done: dict[int, Completion] = {}
        self._draw = engine._runner._sampler.draw
        engine._runner._sampler.draw = self._noted  # type: ignore[method-assign]
        if preempts:
            preempt_often(engine)

    def _noted(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> list[Draw]:
        self.logits.append(([each.prompt.index for each in sequences], logits_NV.clone()))
        return self._draw(logits_NV, sequences)

    def steps(self, prompts: list[Prompt]) -> Iterator[None]:
        for each in self.engine.generate(ListSource(prompts)):
            self.done[each.index] = each
            yield

    def run(self, prompts: list[Prompt]) -> "Watched":
        for _ in self.steps(prompts):
            pass
        assert all(each.error is None for each in self.done.values())
        return self


def assert_same(found: Watched, expected: Watched) -> None:
    """Every step's bits, and what became of them."""
    assert len(found.logits) == len(expected.logits)
    for (rows, one), (others, other) in zip(found.logits, expected.logits, strict=True):
        assert rows == others and torch.equal(one, other)
    assert_same_rows(found, expected)


def assert_same_rows(found: Watched, expected: Watched) -> None:
    assert found.done.keys() == expected.done.keys()
    for index, each in found.done.items():
        assert each.token_ids.tolist() == expected.done[index].token_ids.tolist()
        told, other = each.prompt_logprobs, expected.done[index].prompt_logprobs
        assert (told is None) == (other is None)
        if told is not None and other is not None:
            assert np.array_equal(told.token_ids, other.token_ids)
            assert np.array_equal(told.values, other.values)


def without(engine: EngineCore) -> EngineCore:
    model_of(engine)._scripted = None
    return engine


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_schedule_gives_the_same_bits(folder: Path, deterministic: bool) -> None:
    first: Watched | None = None
    for change in CHANGES:
        options = {name: value for name, value in change.items() if name != "preempts"}
        options["deterministic"] = deterministic
        preempts = "preempts" in change
        found = Watched(load(folder, **options), preempts=preempts).run(make_prompts())
        is_written = model_of(found.engine)._scripted._script is not None
        assert is_written == (change.get("max_batched_tokens") != 1)
        engine = without(load(folder, **options))
        assert_same(found, Watched(engine, preempts=preempts).run(make_prompts()))
        assert not preempts or found.engine.stats().preemptions > 1
        first = first or found
        if deterministic:
            assert_same_rows(found, first)


def test_codes_of_weights_are_read_from_scripts(tmp_path: Path) -> None:
    if kernels.load("cpu").write_script is None:
        pytest.skip(kernels.load("cpu").name)
    made = write_quantised(tmp_path, WAYS["v3 wide fp8"], q_lora_rank=None).quantised
    found = Watched(load(made, dtype="auto")).run(make_prompts())
    model = model_of(found.engine)
    assert model.layers[0].ffn.up.weight.packed.code_panels is not None
    assert model._scripted._script is not None
    assert_same(found, Watched(without(load(made, dtype="auto"))).run(make_prompts()))


def test_memory_that_lacks_for_a_script_means_smaller_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Watched(without(load(folder, deterministic=True))).run(make_prompts())
    watched = Watched(load(folder, deterministic=True))
    made: list[weakref.ref[Script]] = []
    plain_end = Script.end

    def end(script: Script, result_TM: torch.Tensor) -> None:
        made.append(weakref.ref(script))
        if len(made) <= 2:
            raise MemoryError("not enough memory")
        plain_end(script, result_TM)

    monkeypatch.setattr(Script, "end", end)
    gc.collect()
    gc.disable()
    try:
        assert_same_rows(watched.run(make_prompts()), expected)
        assert [each() for each in made[:2]] == [None, None], "what did not fit is kept"
    finally:
        gc.enable()
    assert watched.engine.stats().step_downs == 2
    assert model_of(watched.engine)._scripted._script is made[-1]()


def test_engines_take_turns(folder: Path) -> None:
    """Also with another one's generator in between, and one that is closed early."""
    expected = [Watched(load(folder)).run(make_prompts(seed)) for seed in (3, 4)]
    found = [Watched(load(folder)) for _ in (3, 4)]
    third = load(folder).generate(ListSource(make_prompts()))
    runs = [each.steps(make_prompts(seed)) for each, seed in zip(found, (3, 4), strict=True)]
    next(third)
    while runs:
        runs = [each for each in runs if next(each, StopIteration) is not StopIteration]
        third.close()  # type: ignore[attr-defined]
    assert gc.get_freeze_count() == 0
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_engines_run_side_by_side(folder: Path) -> None:
    expected = [Watched(load(folder)).run(make_prompts(seed)) for seed in (3, 4)]
    found = [Watched(load(folder)) for _ in (3, 4)]
    threads = [
        threading.Thread(target=each.run, args=(make_prompts(seed),))
        for each, seed in zip(found, (3, 4), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_a_closed_engine_keeps_nothing(folder: Path) -> None:
    """Not even until a collection."""
    engine = load(folder)
    assert len(list(engine.generate(ListSource(make_prompts())))) == len(LENGTHS)
    model, forward = model_of(engine), engine._runner._forward
    weight = model.layers[0].attention.out.weight.packed.panels
    kept = [model, model._scripted._script, forward, weight]
    kept += [forward._cache[0][name] for name in forward._cache[0]]  # type: ignore[attr-defined]
    held = [weakref.ref(each) for each in kept]
    gc.collect()
    gc.disable()
    try:
        engine.close()
        del model, forward, weight, kept
        left = [each() for each in held]
    finally:
        gc.enable()
    assert left == [None] * len(held)


@pytest.mark.parametrize("name", ["qwen3_moe", "v32", "v4", "kimi_linear", "minimax_m3"])
def test_no_family_waits_for_a_collection(name: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, name)
    engine = load(tmp_path, dtype="float32", block_size=None)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    assert len(list(engine.generate(ListSource([make_prompt(0, [5, 6, 7], params)])))) == 1
    held = [weakref.ref(model_of(engine)), weakref.ref(engine._runner._forward)]
    gc.collect()
    gc.disable()
    try:
        engine.close()
        left = [each() for each in held]
    finally:
        gc.enable()
    assert left == [None, None]
