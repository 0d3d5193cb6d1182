"""Jobs on replicas of a scripted engine: no weights, but real processes of a Ray cluster."""

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import scripted
from scripted import ScriptedEngine, run_scripted, scripted_seams, scripted_spec

from batchmla.core import Completion, Prompt, PromptSource
from batchmla.errors import DeviceError
from batchmla.jobs.replicas import ReplicaEngine
from batchmla.jobs.replicas_actor import Loaded, ReplicaFacts
from batchmla.jobs.replicas_backlog import WindowSizes
from batchmla.jobs.replicas_cluster import Cluster
from batchmla.jobs.replicas_pool import PoolPlan
from batchmla.jobs.replicas_shape import ReplicaShape
from batchmla.jobs.replicas_worker import Patience
from batchmla.jobs.seams import LoadedEngine
from batchmla.jobs.spec import JobSpec

KILLER = "killer"  # a row with this text ends the process that runs it
SHAPE = ReplicaShape(num_cpus=1, num_gpus=0, memory_share=1.0)


class FragileEngine(ScriptedEngine):
    """Dies of `KILLER`, and of `once` exactly once: the first process to see it leaves a mark."""

    def __init__(self, folder: Path, delay_s: float) -> None:
        super().__init__(max_running=16, delay_s=delay_s)
        self._folder = folder

    def generate(self, source: PromptSource) -> Iterator[Completion]:
        yield from super().generate(_Watched(source, self._look))

    def _look(self, prompt: Prompt) -> None:
        text = bytes(prompt.token_ids.astype(np.uint8)).decode(errors="replace")
        if text == KILLER:
            os._exit(1)
        if text == "slow":
            time.sleep(6)
        for word, number in (("kill once", signal.SIGKILL), ("hang once", signal.SIGSTOP)):
            mark = self._folder / word
            if text == word and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), number)
        if text == "raise once" and not (self._folder / text).exists():
            (self._folder / text).touch()
            raise RuntimeError("the device fell over")


@dataclass
class _Watched:
    source: PromptSource
    look: Callable[[Prompt], None]

    def take(self, limit: int, *, wait: bool) -> Any:
        taken = self.source.take(limit, wait=wait)
        for prompt in taken:
            self.look(prompt)
        return taken


@dataclass(frozen=True)
class Maker:
    """What a replica is told. `folder` is for marks; each process leaves its own."""

    folder: Path
    delay_s: float = 0.0
    load_s: float = 0.0
    error: Exception | None = None
    dies: bool = False

    def __call__(self) -> Loaded:
        (self.folder / f"process-{os.getpid()}").touch()
        time.sleep(self.load_s)
        if self.dies:
            os._exit(1)
        if self.error is not None:
            raise self.error
        context = ray.get_runtime_context()
        facts = ReplicaFacts(
            effective={}, numerics={}, model_files={}, node=context.get_node_id()[:6],
            node_id=context.get_node_id(),
        )  # fmt: skip
        engine = FragileEngine(self.folder, self.delay_s)
        return Loaded(engine=engine, read=pickle.loads, facts=facts)

    def processes(self) -> list[int]:
        return [int(path.name.removeprefix("process-")) for path in self.folder.glob("process-*")]


@dataclass
class RayJob:
    """A scripted job whose engine is replicas; fields may be changed before a run."""

    source: Path
    output: Path
    make: Maker
    address: str
    replicas: tuple[int, int] = (2, 2)
    shape: ReplicaShape = SHAPE
    patience: Patience = field(default_factory=lambda: Patience(place_s=90, pulse_s=0.5))
    sections: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None
    engine: ReplicaEngine | None = None

    def run(self, **wishes: Any) -> Any:
        for module in (scripted, sys.modules[__name__]):
            ray.cloudpickle.register_pickle_by_value(module)
        cluster = Cluster(self.address)
        seams = replace(scripted_seams(None), engine=lambda spec: self._load(spec, cluster))
        loaded = scripted_spec(self.source, self.output, **self.sections)
        try:
            return run_scripted(loaded, seams, **wishes)
        finally:
            cluster.close()

    def _load(self, spec: JobSpec, cluster: Cluster) -> LoadedEngine:
        fewest, most = self.replicas
        plan = PoolPlan(
            make=self.make,
            refuse=_Refuse(self.refusal),
            shape=self.shape,
            sizes=WindowSizes.of(max_num_seqs=16, kv_capacity_tokens=100_000),
            fewest=fewest,
            most=most,
            patience=self.patience,
        )
        self.engine = ReplicaEngine(cluster, plan)
        self.engine.start()
        return LoadedEngine(engine=self.engine, effective={})


@dataclass(frozen=True)
class _Refuse:
    sentence: str | None

    def __call__(self, facts: ReplicaFacts) -> str | None:
        return self.sentence


def no_memory() -> DeviceError:
    return DeviceError("the weights need 700 GB, this node has 80")
