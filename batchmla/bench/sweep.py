"""The sweep: one engine, every concurrency with every pair of lengths, in turns.

Each point has one run for warm-up, which does not count; then all points run once, then all again,
so that a slow minute of the machine does not hit one point alone.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version

from batchmla import __version__
from batchmla.bench.bound import costs_of, least_s, rates_of
from batchmla.bench.measure import Run, measure
from batchmla.bench.memory import used_bytes
from batchmla.bench.request import Request
from batchmla.bench.result import Sweep, is_beaten, make_point
from batchmla.bench.rows import Load, make_rows
from batchmla.core import Engine
from batchmla.engine.config import EngineConfig
from batchmla.engine.describe import describe
from batchmla.engine.engine import load_engine
from batchmla.engine.hardware import Hardware, detect
from batchmla.jobs.local import check_local_engine, describe_engine, plan_local_engine
from batchmla.jobs.options import engine_options
from batchmla.weights.folder import find_model

_LOG = logging.getLogger(__name__)
_WARM_TOKENS = 8


class _Bench:
    """An engine with the loads of a request."""

    def __init__(
        self, request: Request, engine: Engine, config: EngineConfig, vocab_size: int
    ) -> None:
        self.loads = request.loads
        self._request = request
        self._engine = engine
        self._config = config
        self._vocab_size = vocab_size

    def warm_up(self) -> None:
        """Kernels are built, memory is touched: rows of a few tokens at every concurrency."""
        for place, load in enumerate(self.loads):
            new = min(load.output_tokens, _WARM_TOKENS)
            self._measure(replace(load, rows=load.together, output_tokens=new), (place,))

    def run_once(self, repeat: int) -> list[Run]:
        """One run of each load."""
        found = []
        for place, load in enumerate(self.loads):
            run = self._measure(load, (repeat, place))
            found.append(run)
            _LOG.info(
                "run %d of %d: %d + %d tokens, %d at a time: %d rows in %.2f s, %.1f tokens/s",
                repeat + 1, self._request.repeats, load.prompt_tokens, load.output_tokens,
                load.concurrency, load.rows, run.seconds, run.output_tokens / run.seconds,
            )  # fmt: skip
        return found

    def _measure(self, load: Load, seed: Sequence[int]) -> Run:
        prompts = make_rows(load, vocab_size=self._vocab_size, seed=(self._request.seed, *seed))
        return measure(self._engine, prompts, load.concurrency, self._config.device)


def run_sweep(request: Request) -> Sweep:
    """Loads the model and measures.

    Raises a `JobError` for what is wrong and a `DeviceError` for what does not fit, both before
    weights are loaded.
    """
    spec = request.spec()
    folder = find_model(spec.model.path, spec.model.revision)
    check_local_engine(spec)
    config, facts = plan_local_engine(spec, folder), describe(folder)
    hardware = detect(spec.model.device)
    rates, origin = rates_of(hardware, config)
    costs = costs_of(facts, config)
    base_bytes = used_bytes(config.device)
    engine = load_engine(engine_options(spec, folder))
    try:
        bench = _Bench(request, engine, config, facts.config.vocab_size)
        bench.warm_up()
        repeats = [bench.run_once(repeat) for repeat in range(request.repeats)]
    finally:
        engine.close()
    if rates is not None:  # what disturbed one measurement may have spared the other
        rates = rates.best(rates_of(hardware, config)[0] or rates)
    points = [
        make_point(
            [runs[place] for runs in repeats],
            load=load,
            base_bytes=base_bytes,
            least_s=None if rates is None or costs is None else least_s(costs, rates, load),
        )
        for place, load in enumerate(bench.loads)
    ]
    notes = [*config.notes, origin]
    if costs is None:
        notes.append("attention is not to all tokens: no share of the roofline")
    notes += _full_notes(bench.loads, config)
    return Sweep(
        model=request.model,
        hardware=_hardware_words(hardware),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"batchmla": __version__, "torch": version("torch")},
        engine={name: each for name, each in describe_engine(config).items() if name != "notes"},
        planned_bytes=_planned_bytes(config),
        flops_per_s=None if rates is None else rates.flops_per_s,
        bytes_per_s=None if rates is None else rates.bytes_per_s,
        seed=request.seed,
        repeats=request.repeats,
        points=[replace(point, is_pareto=not is_beaten(point, points)) for point in points],
        notes=notes,
    )


def _planned_bytes(config: EngineConfig) -> int:
    """Weights, workspace and pool, of all devices."""
    memory = config.memory
    one = memory.weights_bytes + memory.workspace_bytes + config.kv_pool_bytes
    return one * config.placement.num_ranks


def _hardware_words(machine: Hardware) -> str:
    return machine.name if machine.cores is None else f"{machine.name}, {machine.cores} cores"


def _full_notes(loads: Sequence[Load], config: EngineConfig) -> list[str]:
    """Where the cache does not hold all rows at once."""
    return [
        f"{load.together} rows of {load.row_tokens} tokens at once exceed the KV pool of "
        f"{config.kv_capacity_tokens} tokens: some of them waited"
        for load in loads
        if config.layout.pages_for(load.row_tokens) * load.together > config.num_pages
    ]
