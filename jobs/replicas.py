"""Replicas on Ray as one engine: prompts in, completions out, whatever happens to any of them.

Reading, packing, journal and output stay in the run's process, so that each row is written once,
as on one machine; prompts and completions travel through Ray.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from batchmla.core import Completion, EngineStats, PromptSource
from batchmla.jobs.replicas_actor import ReplicaFacts
from batchmla.jobs.replicas_cluster import Cluster
from batchmla.jobs.replicas_pool import Event, Pool, PoolPlan

_LOOK_S = 0.05  # whether more prompts are there
_CLOSE_S = 5.0


class ReplicaEngine:
    """An `Engine`. `start` waits for the first replica; the others join as they come."""

    def __init__(self, cluster: Cluster, plan: PoolPlan) -> None:
        self._cluster = cluster
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._pool = Pool(plan, self._events)
        self._is_closed = False

    def start(self) -> ReplicaFacts:
        """Raises why there is none: what is wrong with the model, or that the cluster has no place.

        Closes itself if it raises or is left by a signal.
        """
        try:
            self._cluster.call(_call(self._pool.start))
            while True:
                event = self._next(1.0)
                if isinstance(event, ReplicaFacts):
                    return event
                assert event is None, "completions before prompts"
        except BaseException:
            self.close()
            raise

    def generate(self, source: PromptSource) -> Iterator[Completion]:
        """Every prompt of `source` as one completion, as they end."""
        unfinished = 0
        while True:
            wanted = self._pool.rows_wanted - unfinished
            prompts = source.take(wanted, wait=unfinished == 0) if wanted > 0 else ()
            if unfinished == 0 and not prompts:
                return
            if prompts:
                unfinished += len(prompts)
                self._cluster.post(self._pool.add, prompts)
            event = self._next(_LOOK_S)
            if event is None or isinstance(event, ReplicaFacts):
                continue
            for completion in event:
                unfinished -= 1
                yield completion

    def stats(self) -> EngineStats:
        """The sum over all replicas."""
        return self._pool.stats()

    @property
    def num_lost(self) -> int:
        """Deaths of replicas that ran."""
        return self._pool.num_lost

    def close(self) -> None:
        """Ends all replicas; the connection to the cluster stays."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(TimeoutError):  # Ray itself is gone; its processes end with this one
                self._cluster.call(self._pool.stop(), _CLOSE_S)

    def _next(self, wait_s: float) -> ReplicaFacts | Sequence[Completion] | None:
        """What the pool says next, None if nothing within `wait_s`; raises what ended it."""
        event: Event | None = None
        with suppress(Empty):
            event = self._events.get(timeout=wait_s)
        if isinstance(event, BaseException):
            raise event
        return event


async def _call(function: Any) -> None:
    function()
