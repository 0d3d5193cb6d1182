"""Layers run from a script of compiled calls: bit for bit as without, or not at all."""

import random
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import compiled_ops
from steps import Row, run_step
from tiny import read_config, write_tiny

from batchmla import kernels
from batchmla.kernels.cpu.native.script import Script
from batchmla.kv.cache import LayerCache, make_cache
from batchmla.models import get_family
from batchmla.models.load import load_model
from batchmla.parallel import Par
from batchmla.placement import Placement

PAGE_TOKENS, NUM_PAGES = 16, 96
CPU, BF16 = torch.device("cpu"), torch.bfloat16
WRITTEN = ("llama", "v3_wide", "minimax_m2")
# rows of steps: within a script's room, at its edge, beyond it, and fewer again
STEPS = ((3,), (64,), (65,), (1, 1, 1), (90, 1, 30), (1,), (200, 7), (1, 1))


@pytest.fixture(scope="module", params=WRITTEN)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiled_ops()
    made = tmp_path_factory.mktemp(request.param)
    write_tiny(made, request.param)
    return made


def load(folder: Path, dtype: torch.dtype = BF16) -> Any:
    return load_model(
        folder, read_config(folder), Placement(), Par.single(), kernels.load("cpu"), dtype, CPU
    )


def cache_of(folder: Path, dtype: str = "bfloat16") -> tuple[LayerCache, ...]:
    raw = read_config(folder)
    family = get_family(raw)
    layout = family.layout(family.Config.from_hf(raw), dtype, Placement(), PAGE_TOKENS)
    cache = make_cache(layout, NUM_PAGES, CPU, num_lanes=8)
    for layer in cache:
        for part in layer.values():
            part.zero_()
    return cache


def ids_of() -> list[int]:
    source = random.Random(7)
    return [source.randrange(256) for _ in range(600)]


def run(model: Any, cache: Sequence[LayerCache], steps: Sequence[Sequence[int]]) -> list[Row]:
    """Rows that go on in every step that has so many; prompts of the same tokens begin alike."""
    source, ids = random.Random(5), ids_of()
    pool = list(range(NUM_PAGES))
    source.shuffle(pool)
    rows = [Row(ids, [pool.pop() for _ in range(30)], lane=lane) for lane in range(3)]
    for counts in steps:
        run_step(model, cache, list(zip(rows, counts, strict=False)), PAGE_TOKENS)
    return rows


def assert_same(found: Sequence[Row], expected: Sequence[Row]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert len(one.logits) == len(other.logits)
        assert all(map(torch.equal, one.logits, other.logits))


def without(model: Any) -> Any:
    """The model with its layers as they are."""
    model._scripted = None
    return model


def test_a_script_gives_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    plain = Script.run
    monkeypatch.setattr(Script, "run", lambda *args: (runs.append(1), plain(*args))[1])
    model, cache, other = load(folder), cache_of(folder), cache_of(folder)
    found = run(model, cache, STEPS)
    written = model._scripted._script
    assert written is not None and written.capacity >= 207
    # two of eight steps were written down, the first of which was tried at once
    assert len(runs) == len(STEPS) - 1
    assert_same(found, run(without(load(folder)), other, STEPS))
    for one, two in zip(cache, other, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


ODD = {
    "no query rank": ("v3_wide", {"q_lora_rank": None}),
    "tied": ("llama_tied", {}),
    "biases": ("qwen2", {}),
    "dense and wide": ("v3_wide", {"first_k_dense_replace": 2, "intermediate_size": 320}),
    "two shared": ("v3_wide", {"n_shared_experts": 2, "moe_intermediate_size": 32}),
}


@pytest.mark.parametrize("steps", [((1,), (1, 1), (40, 9), (1,)), ((1, 1), (300, 5), (1,), (65,))])
@pytest.mark.parametrize("kind", ODD)
def test_the_first_step_may_be_of_any_size(
    kind: str, steps: Sequence[Sequence[int]], tmp_path: Path
) -> None:
    """torch gives a single row any stride: it does not tell where a second one would be."""
    if kernels.load("cpu").write_script is None:
        pytest.skip(kernels.load("cpu").name)
    name, changes = ODD[kind]
    write_tiny(tmp_path, name, **changes)
    model, cache, other = load(tmp_path), cache_of(tmp_path), cache_of(tmp_path)
    found = run(model, cache, steps)
    assert model._scripted._script is not None
    assert_same(found, run(without(load(tmp_path)), other, steps))
    for one, two in zip(cache, other, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_sizes_and_threads_gives_the_same_bits(folder: Path, seed: int) -> None:
    source, num_threads = random.Random(seed), torch.get_num_threads()
    counts = [[source.choice((1, 1, 2, 31, 33, 64, 65)) for _ in range(3)] for _ in range(7)]
    steps = [each[: source.randrange(1, 4)] for each in counts]
    model, cache = load(folder), cache_of(folder)
    try:
        model.embed.forward = _with_threads(model.embed.forward, source)
        found = run(model, cache, steps)
    finally:
        torch.set_num_threads(num_threads)
    assert model._scripted._script is not None
    assert_same(found, run(without(load(folder)), cache_of(folder), steps))


def _with_threads(function: Any, source: random.Random) -> Any:
    """The same function; the number of threads is another one afterwards."""

    def call(*args: Any) -> Any:
        torch.set_num_threads(source.randrange(1, 4))
        return function(*args)

    return call


@pytest.mark.parametrize("name", ["linear", "attention"])
def test_memory_that_lacks_while_a_step_is_written_down_does_no_harm(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = load(folder), cache_of(folder)
    calls = model._scripted._write.__self__
    noted = {"linear": "note", "attention": "note_attention"}[name]
    made: list[weakref.ref[Script]] = []

    def fail(script: Script, *_: Any) -> None:
        made.append(weakref.ref(script))
        raise MemoryError("not enough memory")

    run(model, cache, STEPS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(Script, noted, fail)
        with pytest.raises(MemoryError):
            run(model, cache, ((90, 1),))
    assert calls._script is None and made[0]() is None
    assert model._scripted._script.capacity == 64 and model._scripted._most_rows is None
    model, cache = load(folder), cache_of(folder)
    assert_same(run(model, cache, STEPS), run(without(load(folder)), cache_of(folder), STEPS))


def test_a_cache_of_records_runs_as_it_is(folder: Path) -> None:
    """Rows are turned into records by torch."""
    model = load(folder)
    found = run(model, cache_of(folder, "fp8"), STEPS[:4])
    assert model._scripted._script is None and model._scripted._most_rows == 0
    assert_same(found, run(without(load(folder)), cache_of(folder, "fp8"), STEPS[:4]))


def test_another_cache_has_a_script_of_its_own(folder: Path) -> None:
    model = load(folder)
    first, second = cache_of(folder), cache_of(folder)
    run(model, first, STEPS[:4])
    before = [part.clone() for layer in first for part in layer.values()]
    found = run(model, second, STEPS[:4])
    assert_same(found, run(without(load(folder)), cache_of(folder), STEPS[:4]))
    after = [part for layer in first for part in layer.values()]
    assert all(map(torch.equal, before, after))


def test_what_torch_computes_is_not_written_down(folder: Path) -> None:
    """float32 is served by torch."""
    model = load(folder, torch.float32)
    found = run(model, cache_of(folder, "float32"), STEPS[:3])
    assert model._scripted._script is None and model._scripted._most_rows == 0
    expected = run(without(load(folder, torch.float32)), cache_of(folder, "float32"), STEPS[:3])
    assert_same(found, expected)


def test_a_script_that_gives_other_values_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Script.run
    monkeypatch.setattr(Script, "run", lambda *args: plain(*args).neg_())
    model = load(folder)
    found = run(model, cache_of(folder), STEPS)
    assert model._scripted._script is None and model._scripted._most_rows == 0
    assert_same(found, run(without(load(folder)), cache_of(folder), STEPS))


def test_a_script_is_written_for_rows_that_are_not_finite(folder: Path) -> None:
    """NaN is not equal to itself, but has the same bits."""
    model, other = load(folder), without(load(folder))
    for each in (model, other):
        each.embed.weight.tensor[ids_of()[2]] = torch.nan
    found = run(model, cache_of(folder), STEPS[:4])
    assert model._scripted._script is not None
    expected = run(other, cache_of(folder), STEPS[:4])
    assert torch.isnan(torch.cat(found[0].logits)).any()
    for one, two in zip(found, expected, strict=True):
        bits = [torch.cat(each.logits).view(torch.int32) for each in (one, two)]
        assert torch.equal(*bits)


def test_a_step_with_too_much_in_memory_runs_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder)
    run(model, cache_of(folder), STEPS[:1])
    most_bytes = 2 * model._scripted._script._num_bytes
    monkeypatch.setattr("batchmla.kernels.cpu.native.script.MOST_BYTES", most_bytes)
    found = run(model, cache_of(folder), STEPS)
    assert model._scripted._script is not None
    assert model._scripted._most_rows == model._scripted._script.capacity < 207
    assert_same(found, run(without(load(folder)), cache_of(folder), STEPS))
