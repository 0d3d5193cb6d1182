"""The ranks of a replica that is spread over several nodes: each is an actor in the replica's
placement group, started by the actor that is rank 0.

Ray places them, tells when one is gone, and ends them with the process that started them; what they
compute is the engine's own business, over connections of their own.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any

from batchmla.engine.build import RankPlan
from batchmla.engine.hardware import Hardware, detect
from batchmla.engine.numerics import use_threads
from batchmla.engine.ranks import Follower
from batchmla.engine.worker import BEAT_S, Report, serve
from batchmla.errors import BatchmlaError, ExitCode
from batchmla.jobs.local import local_numerics
from batchmla.jobs.manifest import model_fingerprint, versions
from batchmla.jobs.replicas_actor import ReplicaFacts
from batchmla.jobs.replicas_cluster import is_alive
from batchmla.jobs.replicas_shape import ReplicaShape
from batchmla.jobs.replicas_worker import first_line
from batchmla.jobs.spec import JobSpec
from batchmla.parallel import Address, KeptStore
from batchmla.weights.folder import find_model


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every process of a replica knows. `threads` are those of all ranks together."""

    spec: JobSpec
    threads: int
    shape: ReplicaShape

    def hardware(self) -> Hardware:
        """Of all ranks, on nodes like this one."""
        found = detect(self.spec.model.device)
        return found.over(self.shape.num_parts, self.shape.num_ranks)

    def facts(self) -> ReplicaFacts:
        """Of this node. Sets the threads of the calling one to the replica's."""
        import ray

        use_threads(self.threads)
        hardware = self.hardware() if self.shape.is_spread else None
        folder = find_model(self.spec.model.path, self.spec.model.revision)
        return ReplicaFacts(
            effective={},
            numerics={**local_numerics(self.spec, hardware), **versions()},
            model_files=model_fingerprint(folder),
            node=ray.util.get_node_ip_address(),
            node_id=ray.get_runtime_context().get_node_id(),
        )


class RankActor:
    """The actor of a rank that follows. One call after the other: `begin`, then `reports`."""

    def __init__(self) -> None:
        self._reports: SimpleQueue[Report] = SimpleQueue()

    def begin(
        self, job: RankJob, plan: RankPlan, address: Address, num_threads: int
    ) -> ReplicaFacts:
        """Starts the rank's work and tells where."""
        facts = job.facts()
        folder = find_model(job.spec.model.path, job.spec.model.revision)
        plan = replace(plan, folder=folder)
        threading.Thread(
            target=serve,
            args=(plan, address, num_threads, self._reports.put),
            name="rank",
            daemon=True,
        ).start()
        return facts

    def reports(self) -> list[Report]:
        """What is new, waiting a little for the first; an answer is a sign of life."""
        found: list[Report] = []
        with suppress(Empty):
            found.append(self._reports.get(timeout=BEAT_S))
            while True:
                found.append(self._reports.get_nowait())
        return found or [Report(kind="alive")]


class RayRanks:
    """A `Launch`, in rank 0's actor."""

    def __init__(self, job: RankJob) -> None:
        self.fault: Exception | None = None
        self._job = job
        self._begun: list[_Remote] = []

    @cached_property
    def hardware(self) -> Hardware:
        return self._job.hardware()

    @property
    def device_index(self) -> int:
        """Ray shows each actor its own GPU only."""
        return 0

    @cached_property
    def meeting(self) -> KeptStore:
        import ray

        return KeptStore.open(ray.util.get_node_ip_address())

    def start(self, plan: RankPlan, num_threads: int) -> Follower:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        shape = self._job.shape
        part = plan.config.placement.rank // shape.part_ranks
        place = PlacementGroupSchedulingStrategy(
            ray.util.get_current_placement_group(), placement_group_bundle_index=part
        )
        actor = ray.remote(RankActor).options(**shape.actor, scheduling_strategy=place).remote()
        asked = actor.begin.remote(self._job, plan, self.meeting.address, num_threads)
        self._begun.append(_Remote(actor, asked))
        return self._begun[-1]

    def failed(self, fault: Exception) -> None:
        """Kept for those who ask this actor for a sign of life: what its engine waits in may not
        end while a machine is silent."""
        self.fault = fault

    def close(self) -> None:
        """The store ends with this process."""

    @property
    def facts(self) -> tuple[ReplicaFacts, ...]:
        """Of the nodes of the others, once the engine is there."""
        return tuple(each.facts for each in self._begun if each.facts is not None)


class _Remote:
    """A `Follower`: the actor of a rank as rank 0 sees it."""

    def __init__(self, actor: Any, begun: Any) -> None:
        self.facts: ReplicaFacts | None = None
        self._actor = actor
        self._asked = begun
        self._end: str | None = None

    @property
    def end(self) -> str | None:
        return self._end

    def reports(self) -> list[Report]:
        """The answer to the last question, if it is there; asks the next one then."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if self._end is not None or not ray.wait([self._asked], timeout=0)[0]:
            return []
        try:
            answer = ray.get(self._asked)
        except RayTaskError as error:
            return [_told(error)]
        except RayActorError as error:
            self._end = self._loss(error)
            return []
        self._asked = self._actor.reports.remote()
        if isinstance(answer, ReplicaFacts):
            self.facts = answer
            return [Report(kind="here")]
        reports: list[Report] = answer
        return reports

    def kill(self) -> None:
        import ray

        if ray.is_initialized():  # else all of it has ended
            with suppress(Exception):
                ray.kill(self._actor)

    def join(self) -> None:
        """Ray ends it."""

    def _loss(self, error: BaseException) -> str:
        if self.facts is None:
            return f"was lost before it began ({first_line(error)})"
        is_there = is_alive(self.facts.node_id)
        why = first_line(error) if is_there else "its node is gone"
        return f"on {self.facts.node} was lost ({why})"


def _told(error: Any) -> Report:
    """What the actor itself raised."""
    cause = error.cause
    if isinstance(cause, BatchmlaError):
        return Report(kind="failed", text=str(cause), exit_code=cause.exit_code)
    return Report(kind="failed", text=str(error), exit_code=ExitCode.INTERNAL)
