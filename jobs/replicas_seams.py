"""The neighbours of a run on Ray: the text side here, the engine as replicas.

The cluster is joined before anything is decided, since its nodes decide it: on what device a
replica runs, how large it is, how long a row may be. One on this machine is started only once a row
needs an engine.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from batchmla.engine.config import EngineConfig
from batchmla.engine.hardware import Hardware, detect
from batchmla.engine.numerics import count_threads
from batchmla.errors import DeviceError
from batchmla.jobs.local import (
    LocalText,
    check_local_engine,
    local_engine,
    local_numerics,
    local_text,
    plan_local_engine,
)
from batchmla.jobs.manifest import read_manifest, versions
from batchmla.jobs.read import open_job_input
from batchmla.jobs.remote import place_of
from batchmla.jobs.remote_store import store_at
from batchmla.jobs.replicas import ReplicaEngine
from batchmla.jobs.replicas_actor import Loaded, ReplicaFacts
from batchmla.jobs.replicas_backlog import WindowSizes
from batchmla.jobs.replicas_cluster import Cluster, NoCluster, nodes, require_ray
from batchmla.jobs.replicas_codec import PromptReader
from batchmla.jobs.replicas_pool import PoolPlan
from batchmla.jobs.replicas_ranks import RankJob, RayRanks
from batchmla.jobs.replicas_shape import Node, ReplicaShape, shape_of
from batchmla.jobs.replicas_worker import Patience
from batchmla.jobs.seams import LoadedEngine, Seams, Table
from batchmla.jobs.settings import ParallelSettings
from batchmla.jobs.spec import JobSpec
from batchmla.text.tokenizer import Tokenizer
from batchmla.weights.folder import find_model

_LOG = logging.getLogger(__name__)


def ray_seams(spec: JobSpec, patience: Patience | None = None) -> Seams:
    """Raises `JobError` where Ray is missing or its address is of no use."""
    require_ray(spec.executor.address)
    neighbours = _Neighbours(patience or Patience())
    return Seams(
        store=store_at,
        table=open_job_input,
        text=neighbours.text,
        engine=neighbours.engine,
        numerics=neighbours.numerics,
        check=neighbours.check,
        close=neighbours.close,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    """`spec` as each replica gets it. `hardware` is that of a replica's node."""

    spec: JobSpec
    hardware: Hardware
    config: EngineConfig
    shape: ReplicaShape
    threads: int


class _Neighbours:
    """The state behind the seams."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._cluster: Cluster | None = None
        self._nodes: list[Node] = []
        self._decided: _Decided | None = None
        self._text: LocalText | None = None

    def text(self, spec: JobSpec, table: Table) -> LocalText:
        decided = self._decide(spec)
        self._text = local_text(decided.spec, table, decided.config.max_model_len)
        return self._text

    def numerics(self, spec: JobSpec) -> Mapping[str, str]:
        decided = self._decide(spec)
        return _numerics(decided.spec, decided.hardware, decided.threads)

    def check(self, spec: JobSpec) -> None:
        decided = self._decide(spec)
        check_local_engine(decided.spec, decided.hardware)
        fewest, _ = spec.executor.bounds
        room = decided.shape.fitting(self._nodes)
        if self._cluster is None and room < fewest:
            raise DeviceError(
                f"executor.replicas: this machine has no place for {fewest} replicas of "
                f"{decided.shape.words} each; ask for {room} at most, or join a cluster by "
                "executor.address"
            )

    def engine(self, spec: JobSpec) -> LoadedEngine:
        decided = self._decide(spec)
        assert self._text is not None, "prompts come before engines"
        cluster = self._cluster
        if cluster is None:
            _LOG.info("starting Ray on this machine")
            (here,) = self._nodes
            cluster = self._cluster = Cluster("local", here)
        fewest, most = spec.executor.bounds
        _LOG.info("replicas asked for: %d, of %s each", fewest, decided.shape.words)
        plan = PoolPlan(
            make=partial(
                make_replica,
                RankJob(spec=decided.spec, threads=decided.threads, shape=decided.shape),
            ),
            refuse=partial(
                _refusal,
                model_files=self._text.model_files,
                numerics=_numerics(decided.spec, decided.hardware, decided.threads),
                is_exact=spec.engine.deterministic,
            ),
            shape=decided.shape,
            sizes=WindowSizes.of(decided.config.max_num_seqs, decided.config.kv_capacity_tokens),
            fewest=fewest,
            most=most,
            patience=self._patience,
        )
        engine = ReplicaEngine(cluster, plan)
        facts = engine.start()
        effective = {
            **facts.effective,
            "executor.replicas": fewest if fewest == most else f"{fewest} to {most}",
            "executor.replica": decided.shape.words,
        }
        return LoadedEngine(engine=engine, effective=effective)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _decide(self, spec: JobSpec) -> _Decided:
        if self._decided is None:
            self._look_for_cluster(spec.executor.address)
            self._decided = self._sizes(spec)
        return self._decided

    def _look_for_cluster(self, address: str) -> None:
        """Joins the cluster, or takes this machine for one."""
        if address != "local":
            try:
                self._cluster = Cluster(address)
                self._nodes = self._cluster.call(_nodes())
                return
            except NoCluster:
                _LOG.info("no Ray cluster is there to be joined: one is started on this machine")
        gpus = detect("auto")
        num_gpus = gpus.count if gpus.kind == "cuda" else 0
        self._nodes = [Node(num_cpus=detect("cpu").cores or os.cpu_count() or 1, num_gpus=num_gpus)]

    def _sizes(self, spec: JobSpec) -> _Decided:
        most_gpus = max((node.num_gpus for node in self._nodes), default=0)
        on_gpu = spec.model.device == "cuda" or (spec.model.device == "auto" and most_gpus > 0)
        hardware = self._gpu(most_gpus) if on_gpu else detect("cpu")
        whole = _with_model(spec, device=hardware.kind, path=_everywhere(spec.model.path))
        folder = find_model(spec.model.path, spec.model.revision)
        whole, num_ranks = settled_ranks(whole, folder, hardware, len(self._nodes))
        shape = shape_of(
            self._nodes,
            num_replicas=spec.executor.bounds[1],
            num_ranks=num_ranks,
            on_gpu=on_gpu,
            wished_cpus=_threads_before(spec),
        )
        if shape.is_spread:
            hardware = hardware.over(shape.num_parts, num_ranks)
        share = spec.model.memory_utilization * shape.memory_share
        each = _with_model(whole, memory_utilization=share)
        config = plan_local_engine(each, folder, hardware)
        if config.misfit is None:  # rows have one limit, whichever replica they come to
            each = _with_model(each, max_model_len=config.max_model_len)
        threads = shape.total_cpus
        if self._cluster is None:
            threads = min(threads, count_threads())  # what the user's environment allows
        return _Decided(spec=each, hardware=hardware, config=config, shape=shape, threads=threads)

    def _gpu(self, most_gpus: int) -> Hardware:
        """The GPU of a replica, from a node that has one where this machine has none."""
        here = detect("auto")
        if here.kind == "cuda" or self._cluster is None:
            return detect("cuda")
        found = self._cluster.call(_ask_for_gpu(self._patience.place_s))
        self._nodes = self._cluster.call(_nodes())  # one with a GPU may have come for it
        return replace(found, count=max([1, *(node.num_gpus for node in self._nodes)]))


def make_replica(job: RankJob) -> Loaded:
    """The engine of a replica, in its process."""
    spec, facts = job.spec, job.facts()
    launch = RayRanks(job) if job.shape.is_spread else None
    loaded = local_engine(spec, launch)
    others = () if launch is None else launch.facts
    folder = find_model(spec.model.path, spec.model.revision)
    return Loaded(
        engine=loaded.engine,
        read=PromptReader(Tokenizer.load(folder)).read,
        facts=replace(facts, effective=loaded.effective, others=others),
        fault=lambda: None if launch is None else launch.fault,
    )


def settled_ranks(
    spec: JobSpec, folder: Path, hardware: Hardware, num_nodes: int
) -> tuple[JobSpec, int]:
    """The ranks of a replica. With `auto` it takes the fewest nodes like `hardware` on which the
    model fits, one of so many if none do; of several nodes the sizes are written into the job."""
    sizes = spec.model.parallel
    if not isinstance(sizes, str):
        return spec, sizes.tensor * sizes.attention_data
    first = plan_local_engine(spec, folder, hardware)
    if first.misfit is None or hardware.kind == "cpu":
        return spec, first.placement.num_ranks
    for count in range(2, num_nodes + 1):
        several = hardware.over(count, count * hardware.count)
        found = plan_local_engine(spec, folder, several)
        if found.misfit is None:
            place = found.placement
            named = ParallelSettings(
                tensor=place.tensor, expert=place.expert, attention_data=place.attention_data
            )
            return _with_model(spec, parallel=named), place.num_ranks
    return spec, first.placement.num_ranks


def _numerics(spec: JobSpec, hardware: Hardware, threads: int) -> dict[str, str]:
    """As a replica will find them."""
    return {**local_numerics(spec, hardware), "threads": str(threads)}


def _refusal(
    facts: ReplicaFacts,
    *,
    model_files: Mapping[str, str],
    numerics: Mapping[str, str],
    is_exact: bool,
) -> str | None:
    """Why a replica does not belong to this job; what is only worth a warning is logged."""
    found = (
        _process_refusal(each, model_files=model_files, numerics=numerics, is_exact=is_exact)
        for each in facts.all
    )
    return next((each for each in found if each is not None), None)


def _process_refusal(
    facts: ReplicaFacts,
    *,
    model_files: Mapping[str, str],
    numerics: Mapping[str, str],
    is_exact: bool,
) -> str | None:
    """The same of one of its processes."""
    if facts.model_files != model_files:
        names = sorted(set(facts.model_files.items()) ^ set(model_files.items()))
        return (
            f"the model on {facts.node} is not the one of this machine: {names[0][0]} differs; "
            "copy the same files to every node"
        )
    expected = {**numerics, **versions()}
    other = [name for name in expected if facts.numerics.get(name) != expected[name]]
    if not other:
        return None
    name = other[0]
    words = f"{name} is {facts.numerics.get(name)} on {facts.node} and {expected[name]} here"
    if is_exact:
        return f"engine.deterministic needs equal nodes, but {words}"
    _LOG.warning("%s: rows may differ between replicas in near-ties", words)
    return None


def _threads_before(spec: JobSpec) -> int | None:
    """Of a job in exact mode that was begun: its rows depend on them, so they stay the same with
    another number of replicas, or of nodes.
    """
    if not spec.engine.deterministic:
        return None
    manifest = read_manifest(place_of(spec.output.path))
    return None if manifest is None else int(manifest.numerics.get("threads", 0)) or None


def _with_model(spec: JobSpec, **fields: Any) -> JobSpec:
    return spec.model_copy(update={"model": spec.model.model_copy(update=fields)})


def _everywhere(path: str) -> str:
    """A model's folder as other processes find it; an id is looked up by each node."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


async def _nodes() -> list[Node]:
    return nodes()


async def _ask_for_gpu(limit_s: float) -> Hardware:
    import ray

    task = ray.remote(detect).options(num_gpus=1, num_cpus=0, max_calls=1)
    found, _ = ray.wait([task.remote("cuda")], timeout=limit_s)
    if not found:
        raise DeviceError(
            f"model.device is cuda, but the cluster gave no GPU within {limit_s:.0f} s; add nodes "
            "with GPUs, or set model.device: cpu"
        )
    hardware: Hardware = ray.get(found[0])
    return hardware
