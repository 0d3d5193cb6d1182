"""`batchmla plan`: memory, capacity, packing and time of a job, before a weight is loaded."""

from dataclasses import asdict, dataclass, field
from typing import Any

from batchmla.engine.calibration import StepTimes
from batchmla.engine.config import EngineConfig
from batchmla.engine.describe import describe
from batchmla.engine.engine import plan_engine
from batchmla.engine.hardware import Hardware, detect, parse_hardware
from batchmla.errors import JobError
from batchmla.jobs.calibrate import calibrate_job
from batchmla.jobs.counts import RowCounts, count_rows
from batchmla.jobs.learned import calibration_key, last_calibration
from batchmla.jobs.options import engine_options
from batchmla.jobs.plan_choice import recommend, warnings
from batchmla.jobs.plan_time import predict_time
from batchmla.jobs.remote import place_of
from batchmla.jobs.settings import ParallelSettings
from batchmla.jobs.soundness import check_what_is_there
from batchmla.jobs.spec import JobSpec, LoadedSpec
from batchmla.kv.capacity import max_concurrency
from batchmla.weights.folder import find_model

PLAN_LENGTHS = (4096, 32768, 40960, 131072, 1048576)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `plan --json` prints. Sizes in bytes of one device, times in seconds; capacity and
    concurrency are those of all devices together, limits of a step those of each attention group.
    """

    job: str
    model: str
    hardware: str
    device: str
    attention: dict[str, int]
    parameters: int
    active_parameters: int
    dtype: str
    kv_dtype: str
    fits: bool
    misfit: str | None
    memory_bytes: int
    reserve_bytes: int
    weights_bytes: int
    workspace_bytes: int
    driver_bytes: int  # of a GPU, besides tensors
    kv_pool_bytes: int
    kv_bytes_per_token: int
    kv_bytes_at: dict[str, int]
    kv_capacity_tokens: int
    max_concurrency: dict[str, float]
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    rows: int | None
    prompt_tokens: int | None
    rows_too_long: int | None
    rows_failing: int | None
    longest_prompt: int | None
    shared_prefix_tokens: int | None
    reusable_tokens: int | None
    predicted_output_tokens: int | None
    predicted_seconds: float | None
    predicted_tokens_per_second: float | None
    predicted_exchange_seconds: float | None  # in which devices only talk to each other
    is_calibrated: bool
    placement: dict[str, int]
    placements: list[dict[str, Any]]
    recommended: dict[str, Any] | None
    packing: str
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return asdict(self)


def plan_job(loaded: LoadedSpec, hardware: str | None = None, *, calibrates: bool = False) -> Plan:
    """Plans for this machine, or for `hardware` such as "8xH200"; allocates no model.

    With `calibrates` the model is loaded here, and its steps are timed for some seconds.
    """
    if calibrates and hardware is not None:
        raise JobError("--calibrate measures this machine; leave --hardware out")
    spec = loaded.spec
    machine = detect(spec.model.device) if hardware is None else parse_hardware(hardware)
    folder = find_model(spec.model.path, spec.model.revision)
    facts = describe(folder)
    options = engine_options(spec, folder)
    config = plan_engine(facts.raw, options, machine)
    notes = [*config.notes, *warnings(config)]
    check_what_is_there(folder, facts.raw, config.placement, spec.model.load_format, notes)
    if config.placement.num_ranks > 1 and spec.model.parallel == ParallelSettings():
        notes.append(
            "model.parallel is not set: sizes are those of the recommended placement, which a run "
            "takes with model.parallel: auto"
        )
    if facts.quantization is not None:
        notes.append(_quantised_note(facts.quantization, config))
    counts = count_rows(spec, folder, config.max_model_len, config.layout.page_tokens, notes)
    lengths = sorted(
        {length for length in PLAN_LENGTHS if length <= facts.config.max_positions}
        | {config.max_model_len}
    )
    layout, placement = config.layout, config.placement
    found, recommended = recommend(facts.raw, options, machine, counts)
    times = _times(loaded, config, machine, counts, calibrates=calibrates)
    if spec.executor.kind == "ray":
        notes.append(f"sizes and time are those of one replica; {_replicas(spec)} share the rows")
    predicted = predict_time(facts.raw, config, machine, counts, times, notes)
    return Plan(
        job=spec.name,
        model=spec.model.path,
        hardware=machine.words,
        device=config.device,
        attention=facts.attention,
        parameters=facts.total_params,
        active_parameters=facts.active_params,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        fits=config.misfit is None,
        misfit=config.misfit,
        memory_bytes=config.memory.total_bytes,
        reserve_bytes=config.memory.reserve_bytes,
        weights_bytes=config.memory.weights_bytes,
        workspace_bytes=config.memory.workspace_bytes,
        driver_bytes=config.memory.driver_bytes,
        kv_pool_bytes=config.kv_pool_bytes,
        kv_bytes_per_token=layout.bytes_for(1),
        kv_bytes_at={str(length): layout.bytes_for(length) for length in lengths},
        kv_capacity_tokens=config.kv_capacity_tokens,
        max_concurrency={
            str(length): round(placement.attention_data * many, 2)
            for length, many in max_concurrency(layout, config.num_pages, lengths).items()
        },
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        block_size=layout.page_tokens,
        rows=counts.rows,
        prompt_tokens=counts.prompt_tokens,
        rows_too_long=counts.rows_too_long,
        rows_failing=counts.rows_failing,
        longest_prompt=counts.longest_prompt,
        shared_prefix_tokens=counts.shared_prefix_tokens,
        reusable_tokens=counts.reusable_tokens if config.prefix_caching else 0,
        predicted_output_tokens=counts.output_tokens,
        predicted_seconds=None if predicted is None else predicted.seconds,
        predicted_tokens_per_second=None if predicted is None else predicted.tokens_per_s,
        predicted_exchange_seconds=None if predicted is None else predicted.exchange_seconds,
        is_calibrated=predicted is not None and predicted.is_calibrated,
        placement={
            "tensor": placement.tensor,
            "expert": placement.expert,
            "attention_data": placement.attention_data,
        },
        placements=[each.to_json() for each in found],
        recommended=None if recommended is None else recommended.to_json(),
        packing=_packing_words(spec),
        notes=notes,
    )


def _replicas(spec: JobSpec) -> str:
    fewest, most = spec.executor.bounds
    return str(fewest) if fewest == most else f"{fewest} to {most}"


def _quantised_note(method: str, config: EngineConfig) -> str:
    if config.keeps_quantised:
        return f"weights stay in {method} as published; products are in {config.dtype}"
    return f"weights are published in {method} and expanded to {config.dtype}"


def _times(
    loaded: LoadedSpec,
    config: EngineConfig,
    machine: Hardware,
    counts: RowCounts,
    *,
    calibrates: bool,
) -> StepTimes | None:
    """What steps take on this machine: measured now, or by this job's last run."""
    spec = loaded.spec
    if calibrates:
        return calibrate_job(spec, config, counts)
    if not machine.is_local:
        return None
    key = calibration_key(spec.model.path, config, machine.name)
    return last_calibration(place_of(spec.output.path), key)


def _packing_words(spec: JobSpec) -> str:
    if spec.engine.order == "input":
        return "input order"
    return (
        "shared prefixes together, long prompts mixed with long completions, within "
        f"{spec.engine.window_rows:,} rows of the oldest unfinished one"
    )
