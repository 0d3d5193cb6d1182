"""The engine of a replica: windows come and go, it goes on. Without Ray."""

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes import make_prompt
from scripted import POISON_ID, ScriptedEngine, answer_ids

from batchmla.core import Completion
from batchmla.errors import DeviceError
from batchmla.jobs.replicas_actor import EngineThread, Loaded, Replica, ReplicaFacts, ReplicaFailed


def made(engine: ScriptedEngine) -> Callable[[], Loaded]:
    facts = ReplicaFacts(effective={"n": 1}, numerics={}, model_files={}, node="here")
    return lambda: Loaded(engine=engine, read=pickle.loads, facts=facts)


async def collect(thread: EngineThread, first: int, count: int) -> list[Completion]:
    prompts = [make_prompt(n, [n + 2, n + 3]) for n in range(first, first + count)]
    found: list[Completion] = []
    async for batch in thread.run(pickle.dumps(prompts)):
        found += batch.completions
    return found


def test_windows_run_together_in_one_engine() -> None:
    engine = ScriptedEngine(max_running=8)

    async def play() -> list[list[Completion]]:
        thread = EngineThread(made(engine))
        assert (await thread.facts()).effective == {"n": 1}
        windows = await asyncio.gather(*(collect(thread, 10 * n, 10) for n in range(4)))
        later = await collect(thread, 100, 3)
        assert thread.stats().generated_tokens == engine.num_generated > 0
        return [*windows, later]

    *windows, later = asyncio.run(play())
    for n, window in enumerate(windows):
        assert sorted(each.index for each in window) == list(range(10 * n, 10 * n + 10))
        for each in window:
            ids = answer_ids(make_prompt(0, [each.index + 2, each.index + 3]).token_ids)
            assert each.token_ids.tolist() == ids.tolist()
    assert sorted(each.index for each in later) == [100, 101, 102]


def test_an_engine_that_fails_fails_every_window_with_its_reason() -> None:
    engine = ScriptedEngine(max_running=4, fail_after=5, error=RuntimeError("cuda fell over"))

    async def play() -> list[Any]:
        thread = EngineThread(made(engine))
        await thread.facts()
        calls = (collect(thread, 10 * n, 10) for n in range(2))
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(play()):
        assert isinstance(error, ReplicaFailed) and "RuntimeError: cuda fell over" in str(error)


def test_what_is_wrong_with_a_model_is_raised_by_load() -> None:
    def make() -> Loaded:
        raise DeviceError("it does not fit")

    async def play() -> None:
        replica = Replica()
        assert (await replica.stats()).steps == 0
        for _ in range(2):
            with pytest.raises(DeviceError, match="does not fit"):
                await replica.load(make)

    asyncio.run(play())


def test_a_row_that_fails_is_a_completion_like_others() -> None:
    async def play() -> list[Completion]:
        thread = EngineThread(made(ScriptedEngine()))
        prompts = pickle.dumps([make_prompt(0, [POISON_ID]), make_prompt(1, [5])])
        return [one async for batch in thread.run(prompts) for one in batch.completions]

    found = {each.index: each.error for each in asyncio.run(play())}
    assert found == {0: "poison in the prompt", 1: None}


def test_a_sign_of_life_tells_of_a_rank_that_is_gone_though_the_engine_still_waits() -> None:
    faults: list[Exception] = []
    loaded = replace(made(ScriptedEngine())(), fault=lambda: faults[0] if faults else None)

    async def play() -> None:
        replica = Replica()
        await replica.load(lambda: loaded)
        assert (await replica.stats()).steps == 0
        faults.append(DeviceError("rank 9 on node b was lost"))
        with pytest.raises(ReplicaFailed, match="DeviceError: rank 9 on node b was lost"):
            await replica.stats()

    asyncio.run(play())
