"""All replicas of a run: started, scaled between the fewest and the most, watched as a whole.

In the connection's thread; the run's own thread gets completions, or the error that ended it all,
from `events`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from batchmla.core import Completion, EngineStats, Prompt
from batchmla.errors import DeviceError
from batchmla.jobs.replicas_actor import Loaded, ReplicaFacts
from batchmla.jobs.replicas_backlog import MOST_STRIKES, Backlog, WindowSizes
from batchmla.jobs.replicas_shape import ReplicaShape
from batchmla.jobs.replicas_worker import Patience, Phase, Worker

Event = ReplicaFacts | Sequence[Completion] | BaseException

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What a pool is made of. `refuse` says why a replica does not belong to the job, if so."""

    make: Callable[[], Loaded]
    refuse: Callable[[ReplicaFacts], str | None]
    shape: ReplicaShape
    sizes: WindowSizes
    fewest: int
    most: int
    patience: Patience


class Pool:
    """See the module; a `Foreman`."""

    def __init__(self, plan: PoolPlan, events: "SimpleQueue[Event]") -> None:
        self.num_lost = 0
        self._plan = plan
        self._events = events
        self._backlog = Backlog(plan.sizes)
        self._workers: dict[asyncio.Task[None], Worker] = {}
        self._gone_stats: list[EngineStats] = []
        self._num_named = 0
        self._num_given_up = 0
        self._losses = 0  # since a row ended
        self._watch: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def rows_wanted(self) -> int:
        """How many unfinished prompts keep all replicas busy, those that may yet come included."""
        sizes, most = self._plan.sizes, self._plan.most
        return most * (sizes.replica_rows + 2 * sizes.window_rows)

    @property
    def num_running(self) -> int:
        return sum(each.phase is Phase.RUNNING for each in tuple(self._workers.values()))

    def stats(self) -> EngineStats:
        """The sum over all replicas, from any thread; of those that are gone what they did."""
        workers = tuple(self._workers.values())
        past = [*self._gone_stats, *(each for worker in workers for each in worker.past_stats)]
        return _sum([each.pid_stats for each in workers], past)

    def start(self) -> None:
        """Begins with the fewest replicas."""
        for _ in range(self._plan.fewest):
            self._hire()
        self._watch = asyncio.create_task(self._watch_all())

    def add(self, prompts: Sequence[Prompt]) -> None:
        """More prompts, in packed order."""
        self._backlog.add(prompts)
        self._wake_all()

    async def stop(self) -> None:
        """Ends all replicas at once, with what they run."""
        self._is_over = True
        tasks = [*self._workers, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # as a foreman

    def is_ready(self, facts: ReplicaFacts) -> None:
        refusal = self._plan.refuse(facts)
        if refusal is not None:
            raise DeviceError(refusal)
        _LOG.info("a replica is ready on %s (%d running)", facts.nodes, self.num_running + 1)
        self._events.put(facts)

    def has_ended(self, completions: Sequence[Completion]) -> None:
        if completions:
            self._losses = 0
            self._events.put(completions)

    def was_lost(self, reason: str) -> None:
        self._losses += 1
        self.num_lost += 1
        if self._losses > MOST_STRIKES * (1 + len(self._workers)):
            self._end(
                DeviceError(
                    f"replicas died {self._losses} times without finishing a row, the last time: "
                    f"{reason}; finished rows are saved, the same command goes on"
                )
            )
        self._wake_all()

    # workers

    def _hire(self) -> None:
        self._num_named += 1
        worker = Worker(
            f"replica {self._num_named}",
            make=self._plan.make,
            shape=self._plan.shape,
            backlog=self._backlog,
            foreman=self,
            patience=self._plan.patience,
        )
        task = asyncio.create_task(worker.live())
        self._workers[task] = worker
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        worker = self._workers.pop(task)
        self._gone_stats += [*worker.past_stats, worker.pid_stats]
        if self._is_over or task.cancelled():
            return
        error = task.exception()
        self._wake_all()
        if error is None:
            return
        self._num_given_up += 1
        if not self._workers:
            self._end(error)
        else:
            _LOG.warning("%s is given up: %s", worker.name, error)

    def _end(self, error: BaseException) -> None:
        if not self._is_over:
            self._is_over = True
            self._events.put(error)

    def _wake_all(self) -> None:
        for worker in self._workers.values():
            worker.wake.set()

    async def _watch_all(self) -> None:
        """Looks now and then whether replicas are missing, wanted or idle."""
        loop, patience = asyncio.get_running_loop(), self._plan.patience
        waits_since_s = loop.time()
        is_begun = False
        while not self._is_over:
            workers = tuple(self._workers.values())
            placed = self._num_given_up + sum(each.was_placed for each in workers)
            is_begun |= placed >= self._plan.fewest
            has_any = any(each.phase in (Phase.LOADING, Phase.RUNNING) for each in workers)
            if is_begun and has_any:
                waits_since_s = loop.time()
            elif loop.time() - waits_since_s > patience.place_s:
                self._end(DeviceError(self._missing(is_begun)))
            self._scale(loop.time())
            await asyncio.sleep(patience.look_s)

    def _scale(self, now_s: float) -> None:
        plan, workers = self._plan, tuple(self._workers.values())
        if not self.num_running or self._num_given_up > 2 * plan.most:
            return
        waiting = self._backlog.waiting_rows - plan.sizes.window_rows
        free = plan.most - len(workers)
        wanted = min(free, -(-waiting // plan.sizes.replica_rows))
        if wanted > 0 and all(each.phase is Phase.RUNNING for each in workers):
            _LOG.info("rows wait: more replicas asked for: %d", wanted)
            for _ in range(wanted):
                self._hire()
        elif self._backlog.waiting_rows == 0 and len(workers) > plan.fewest:
            for task, worker in tuple(self._workers.items())[plan.fewest :]:
                since_s = worker.idle_since_s
                if worker.phase is Phase.PLACING and not worker.was_placed:
                    task.cancel()
                elif since_s is not None and now_s - since_s > plan.patience.idle_s:
                    _LOG.info("%s has nothing to do and is given back", worker.name)
                    worker.retire()

    def _missing(self, is_begun: bool) -> str:
        plan = self._plan
        each = f"of {plan.shape.words} each"
        placed = sum(worker.was_placed for worker in self._workers.values())
        if is_begun:
            return (
                f"all replicas were lost and the cluster gave no place for another one {each} "
                f"within {plan.patience.place_s:.0f} s; finished rows are saved, the same command "
                "goes on"
            )
        return (
            f"executor.replicas: the cluster gave {placed} of {plan.fewest} replicas {each} a "
            f"place within {plan.patience.place_s:.0f} s; ask for fewer, or for a range such as "
            f"{{min: 1, max: {plan.most}}}, or add nodes"
        )


_NOW = ("running", "waiting", "used_pages", "total_pages")
_TOTALS = (
    "steps", "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens", "preemptions",
    "step_downs", "step_s",
)  # fmt: skip


def _sum(present: Sequence[EngineStats], past: Sequence[EngineStats]) -> EngineStats:
    """Totals of all, what is running now of those that live; memory of the one that took most, and
    the expert load of the one that generated most.
    """
    every = (*present, *past)
    busiest = max(every, key=lambda each: each.generated_tokens, default=EngineStats())
    counts = {name: sum(getattr(each, name) for each in every) for name in _TOTALS}
    now = {name: sum(getattr(each, name) for each in present) for name in _NOW}
    return EngineStats(
        **counts,
        **now,
        peak_bytes=max((each.peak_bytes for each in every), default=0),
        expert_load=busiest.expert_load,
    )
