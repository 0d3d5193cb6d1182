"""One replica as the run sees it: placed, loaded, fed, and after a death loaded and fed again.

Ray places it, watches its process and starts it anew, on another node if need be. In the
connection's thread.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from batchmla.core import Completion, EngineStats, Prompt
from batchmla.errors import BatchmlaError, DeviceError
from batchmla.jobs.replicas_actor import Batch, Loaded, Replica, ReplicaFacts
from batchmla.jobs.replicas_backlog import Backlog, Load, Window
from batchmla.jobs.replicas_cluster import is_alive
from batchmla.jobs.replicas_codec import write_prompts
from batchmla.jobs.replicas_shape import ReplicaShape

_LOAD_TRIES = 3
_CONCURRENCY = 1000  # calls of an actor under way: windows and questions
_LOG = logging.getLogger(__name__)


class Phase(Enum):
    """Where a replica stands."""

    PLACING = "waiting for a place"
    LOADING = "loading the model"
    RUNNING = "running"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """`place_s`: how long the cluster may take to give the fewest replicas a place, and a job to be
    without any. `silent_s`: how long a replica may give no sign of life.
    """

    place_s: float = 600.0
    silent_s: float = 300.0
    pulse_s: float = 2.0
    look_s: float = 0.5
    idle_s: float = 30.0  # after so long a replica beyond the fewest is given back


class Foreman(Protocol):
    """Whom a worker tells what happens."""

    def is_ready(self, facts: ReplicaFacts) -> None:
        """An engine is there; raises for one that does not belong to this job."""
        ...

    def has_ended(self, completions: Sequence[Completion]) -> None:
        """Prompts have completions."""
        ...

    def was_lost(self, reason: str) -> None:
        """A replica died, or was killed, while it ran."""
        ...


class Worker:
    """A replica's driver."""

    def __init__(
        self,
        name: str,
        *,
        make: Callable[[], Loaded],
        shape: ReplicaShape,
        backlog: Backlog,
        foreman: Foreman,
        patience: Patience,
    ) -> None:
        self.name = name
        self.phase = Phase.PLACING
        self.wake = asyncio.Event()
        self.idle_since_s: float | None = None
        self.facts: ReplicaFacts | None = None
        self.pid_stats = EngineStats()  # of the present process
        self.past_stats: list[EngineStats] = []  # of those that died
        self.was_placed = False
        self._make = make
        self._shape = shape
        self._backlog = backlog
        self._foreman = foreman
        self._patience = patience
        self._group: Any = None
        self._actor: Any = None
        self._failure: str | None = None
        self._process: str | None = None  # the last one that answered
        self._is_retired = False
        self._windows: dict[asyncio.Task[None], Window] = {}

    async def live(self) -> None:
        """Until it is retired or cancelled; raises why it cannot go on."""
        try:
            self._reserve()
            while not self._is_retired:
                self.facts = await self._load()
                self._foreman.is_ready(self.facts)
                await self._feed()
        finally:
            self.phase = Phase.GONE
            self._free()

    def retire(self) -> None:
        """No window more; ends once what it holds has ended."""
        self._is_retired = True
        self.wake.set()

    @property
    def is_idle(self) -> bool:
        return not self._windows

    # placing and loading

    def _reserve(self) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        shape = self._shape
        bundles = [shape.bundle] * shape.num_parts
        self._group = placement_group(bundles, strategy="PACK")  # parts may share a node
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        self._actor = (
            ray.remote(Replica)
            .options(
                **shape.actor,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=_CONCURRENCY,
                scheduling_strategy=place,
            )
            .remote()
        )

    async def _load(self) -> ReplicaFacts:
        """Has the engine loaded in the actor's process, wherever Ray has put it."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        reason = ""
        for _ in range(_LOAD_TRIES):
            try:
                await self._wait_for_process()
                facts: ReplicaFacts = await self._actor.load.remote(self._make)
                return facts
            except RayTaskError as error:
                cause = error.cause
                if not _is_loss(cause):
                    if isinstance(cause, BatchmlaError):
                        raise type(cause)(f"{self.name}: {cause}") from error
                    raise cause from error
                reason = str(cause)
                ray.kill(self._actor, no_restart=False)  # all its ranks are begun anew
            except RayActorError as error:
                reason = first_line(error)
            _LOG.warning("%s ended while it loaded the model: %s", self.name, reason)
        raise DeviceError(
            f"{self.name} ended {_LOAD_TRIES} times while it loaded the model ({reason}); if "
            "memory was short, lower model.memory_utilization or executor.replicas"
        )

    async def _wait_for_process(self) -> None:
        """Until Ray has put the replica somewhere and another process than the dead one answers.

        Raises `DeviceError` where the cluster knows nothing of the replica any more.
        """
        from ray.exceptions import ActorUnavailableError, RayActorError

        self.phase = Phase.PLACING
        while True:
            try:
                if await asyncio.to_thread(self._group.wait, 1):
                    self.was_placed = True
                    with suppress(ActorUnavailableError):  # it is being started
                        name = await self._actor.process.remote()
                        if name != self._process:
                            self._process, self.phase = name, Phase.LOADING
                            return
            except RayActorError:
                raise
            except Exception as error:  # whatever Ray raises where there is no cluster
                raise DeviceError(
                    f"the Ray cluster is gone, or has forgotten {self.name} ({first_line(error)}); "
                    "finished rows are saved, the same command goes on"
                ) from error
            await asyncio.sleep(self._patience.look_s)

    def _free(self) -> None:
        """Gives process and place back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with suppress(Exception):  # the cluster may be gone, too
            if self._actor is not None:
                ray.kill(self._actor)
            if self._group is not None:
                remove_placement_group(self._group)

    # feeding

    async def _feed(self) -> None:
        """Keeps the replica's process busy until it dies or is retired."""
        load = self._backlog.open_load()
        self._failure, self.phase = None, Phase.RUNNING
        pulse = asyncio.create_task(self._feel_pulse())
        try:
            while self._failure is None and not (self._is_retired and self.is_idle):
                window = None if self._is_retired else self._backlog.take(load)
                if window is not None:
                    self.idle_since_s = None
                    self._windows[asyncio.create_task(self._run(window, load))] = window
                    continue
                if self.is_idle and self.idle_since_s is None:
                    self.idle_since_s = asyncio.get_running_loop().time()
                await self.wake.wait()
                self.wake.clear()
            if self._failure is not None:
                await self._take_back(load)
        finally:
            pulse.cancel()
            for task in self._windows:
                task.cancel()
            self._windows.clear()
            self._backlog.close_load(load)
            self.past_stats.append(self.pid_stats)
            self.pid_stats = EngineStats()

    async def _run(self, window: Window, load: Load) -> None:
        """One window; what has ended is taken out of it."""
        left = {prompt.index: prompt for prompt in window.prompts}
        try:
            stream = self._actor.run.options(num_returns="streaming").remote(
                write_prompts(window.prompts)
            )
            async for answer in stream:
                batch: Batch = await answer
                self.pid_stats = batch.stats
                for completion in batch.completions:
                    self._backlog.end(load, left.pop(completion.index))
                window.prompts = list(left.values())
                self._foreman.has_ended(batch.completions)
                self.wake.set()
            if left:
                self._fail("a stream of completions broke off")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(first_line(error))
        if not left:
            self._windows.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        self.wake.set()

    async def _feel_pulse(self) -> None:
        """Asks for a sign of life again and again."""
        while True:
            await asyncio.sleep(self._patience.pulse_s)
            try:
                asked = _answer(self._actor.stats.remote())
                self.pid_stats = await asyncio.wait_for(asked, self._patience.silent_s)
            except TimeoutError:
                self._fail(f"it gave no sign of life for {self._patience.silent_s:.0f} s")
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._fail(first_line(error))

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        self.wake.set()

    async def _take_back(self, load: Load) -> None:
        """Ends the process if it still lives, so that nothing of it comes late, and returns its
        prompts to the backlog.
        """
        import ray

        assert self._failure is not None and self.facts is not None
        with suppress(Exception):  # it is dead already
            ray.kill(self._actor, no_restart=False)
        for task in self._windows:
            task.cancel()
        await asyncio.gather(*self._windows, return_exceptions=True)
        is_suspect = all(is_alive(each.node_id) for each in self.facts.all)  # else a node's death
        guilty: list[Prompt] = []
        for window in self._windows.values():
            guilty += self._backlog.give_back(load, window, is_suspect=is_suspect)
        count = sum(len(window.prompts) for window in self._windows.values()) - len(guilty)
        self._windows.clear()
        _LOG.warning(
            "%s on %s was lost (%s); %d rows are run again", self.name, self.facts.nodes,
            self._failure, count,
        )  # fmt: skip
        self._foreman.was_lost(self._failure)
        self._foreman.has_ended([failed_row(prompt, self._failure) for prompt in guilty])


def _is_loss(error: BaseException) -> bool:
    """Whether it is a rank's death that kept a replica from loading."""
    from batchmla.parallel import LostPeer  # late: it brings torch

    return isinstance(error, LostPeer)


def failed_row(prompt: Prompt, reason: str) -> Completion:
    """Of a row that its replicas did not survive."""
    from batchmla.engine.sequence import failed  # late: it brings torch
    from batchmla.jobs.replicas_backlog import MOST_STRIKES

    return failed(
        prompt,
        f"row {prompt.row_id}: {MOST_STRIKES} times a replica died while it ran this row, the last "
        f"time with no other ({reason})",
    )


def first_line(error: BaseException) -> str:
    """What Ray says, in short."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

    if isinstance(error, RayTaskError):
        return str(error.cause)
    if isinstance(error, ActorDiedError | ActorUnavailableError):
        return "its process ended"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


async def _answer(reference: Any) -> Any:
    return await reference
