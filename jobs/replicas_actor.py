"""A replica: one engine in a process of its own, as an asynchronous Ray actor.

The engine runs in a thread from its first prompt to the end of the process and takes prompts as
windows arrive, so that it never drains between two of them. It knows no files and no texts.
"""

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchmla.core import Completion, Engine, EngineStats, Prompt

_GATHER_S = 0.02  # completions that end within it travel together
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What a replica says of itself once its engine is there. `others`: of the processes of its
    other ranks, where each has an actor.
    """

    effective: Mapping[str, Any]
    numerics: Mapping[str, str]
    model_files: Mapping[str, str]
    node: str = ""
    node_id: str = ""
    others: "tuple[ReplicaFacts, ...]" = ()

    @property
    def all(self) -> "tuple[ReplicaFacts, ...]":
        """Of each process."""
        return (self, *self.others)

    @property
    def nodes(self) -> str:
        """Where it is, in words."""
        return " and ".join(dict.fromkeys(each.node for each in self.all))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a replica runs. `fault`: what ended its other ranks, if something did."""

    engine: Engine
    read: Callable[[bytes], list[Prompt]]
    facts: ReplicaFacts
    fault: Callable[[], Exception | None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Completions of a window, and the engine's counts when they were sent."""

    completions: Sequence[Completion]
    stats: EngineStats


class ReplicaFailed(Exception):
    """The engine raised: this process is of no more use."""


class Replica:
    """The actor. Its methods run in one event loop."""

    def __init__(self) -> None:
        self._thread: EngineThread | None = None
        self._name = secrets.token_hex(8)

    async def process(self) -> str:
        """A name of this process, another one after each restart."""
        return self._name

    async def load(self, make: Callable[[], Loaded]) -> ReplicaFacts:
        """Loads the engine, once a process; raises what `make` raises."""
        if self._thread is None:
            self._thread = EngineThread(make)
        return await self._thread.facts()

    async def run(self, data: bytes) -> AsyncIterator[Batch]:
        """The completions of a window of prompts, as they end. Raises `ReplicaFailed`."""
        if self._thread is None:
            raise ReplicaFailed("its process was started anew")
        async for batch in self._thread.run(data):
            yield batch

    async def stats(self) -> EngineStats:
        """The engine's counts; an answer is a sign of life, of all ranks. Raises `ReplicaFailed`
        if another rank is gone."""
        return EngineStats() if self._thread is None else self._thread.stats()


class EngineThread:
    """The engine's thread, and the event loop's side of it. Made in a running loop."""

    def __init__(self, make: Callable[[], Loaded]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self._source = FedSource()
        self._windows: dict[int, _Open] = {}  # by the index of each prompt under way
        self._failure: str | None = None
        threading.Thread(target=self._serve, name="engine", daemon=True).start()

    async def facts(self) -> ReplicaFacts:
        """Waits for the engine."""
        return (await asyncio.shield(self._loaded)).facts

    def stats(self) -> EngineStats:
        """The engine's counts, none while it loads; see `Replica.stats`."""
        if not self._loaded.done() or self._loaded.exception() is not None:
            return EngineStats()
        loaded = self._loaded.result()
        fault = loaded.fault()
        if fault is not None:
            raise ReplicaFailed(_words(fault))
        return loaded.engine.stats()

    async def run(self, data: bytes) -> AsyncIterator[Batch]:
        """See `Replica.run`."""
        loaded = await asyncio.shield(self._loaded)
        prompts = loaded.read(data)
        window = _Open(len(prompts))
        self._windows.update((prompt.index, window) for prompt in prompts)
        self._source.put(prompts)
        while window.left:
            await window.changed.wait()
            if self._failure is None:
                await asyncio.sleep(_GATHER_S)
            completions = window.collect()
            if completions:
                yield Batch(completions=completions, stats=loaded.engine.stats())
            if self._failure is not None and window.left:
                raise ReplicaFailed(self._failure)

    # the engine's thread

    def _serve(self) -> None:
        try:
            loaded = self._make()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._loaded.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self._loaded.set_result, loaded)
        try:
            for completion in loaded.engine.generate(self._source):
                self._loop.call_soon_threadsafe(self._arrived, completion)
        except BaseException as error:
            _LOG.exception("the engine of this replica failed")
            self._loop.call_soon_threadsafe(self._fail, _words(error))

    # in the event loop

    def _arrived(self, completion: Completion) -> None:
        self._windows.pop(completion.index).add(completion)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        for window in self._windows.values():
            window.changed.set()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class _Open:
    """A window under way."""

    def __init__(self, num_rows: int) -> None:
        self.left = num_rows
        self.changed = asyncio.Event()
        self._completions: list[Completion] = []

    def add(self, completion: Completion) -> None:
        self._completions.append(completion)
        self.changed.set()

    def collect(self) -> list[Completion]:
        found, self._completions = self._completions, []
        self.left -= len(found)
        self.changed.clear()
        return found


class FedSource:
    """A `PromptSource` without an end: prompts come as long as the process lives."""

    def __init__(self) -> None:
        self._waiting: deque[Prompt] = deque()
        self._changed = threading.Condition()

    def put(self, prompts: Sequence[Prompt]) -> None:
        """Adds prompts in the order of use."""
        with self._changed:
            self._waiting.extend(prompts)
            self._changed.notify_all()

    def take(self, limit: int, *, wait: bool) -> Sequence[Prompt]:
        """Up to `limit` prompts; with `wait` at least one."""
        with self._changed:
            while wait and not self._waiting:
                self._changed.wait()
            count = min(limit, len(self._waiting))
            return [self._waiting.popleft() for _ in range(count)]
