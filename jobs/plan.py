"""`batchmla plan`: memory, capacity, packing and time of a job, before a weight is loaded."""

from dataclasses import asdict, dataclass, field
from typing import Any

from batchmla.engine.config import EngineConfig
from batchmla.engine.describe import ModelFacts, describe
from batchmla.engine.engine import plan_engine
from batchmla.engine.hardware import Hardware, detect, parse_hardware
from batchmla.engine.roofline import Rates, Workload, measure_cpu_rates, predict_seconds
from batchmla.jobs.counts import RowCounts, count_rows
from batchmla.jobs.options import engine_options
from batchmla.jobs.soundness import check_what_is_there
from batchmla.jobs.spec import JobSpec, LoadedSpec
from batchmla.kv.capacity import max_concurrency
from batchmla.weights.folder import find_model

PLAN_LENGTHS = (4096, 32768, 40960, 131072, 1048576)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `plan --json` prints. Sizes in bytes of one device, times in seconds."""

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
    packing: str
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return asdict(self)


def plan_job(loaded: LoadedSpec, hardware: str | None = None) -> Plan:
    """Plans for this machine, or for `hardware` such as "8xH200"; allocates no model."""
    spec = loaded.spec
    machine = detect(spec.model.device) if hardware is None else parse_hardware(hardware)
    folder = find_model(spec.model.path, spec.model.revision)
    facts = describe(folder)
    config = plan_engine(facts.raw, engine_options(spec, folder), machine)
    notes = list(config.notes)
    check_what_is_there(folder, facts.raw, config.placement, spec.model.load_format, notes)
    if facts.quantization is not None:
        notes.append(_quantised_note(facts.quantization, config))
    counts = count_rows(spec, folder, config.max_model_len, config.layout.page_tokens, notes)
    lengths = sorted(
        {length for length in PLAN_LENGTHS if length <= facts.config.max_positions}
        | {config.max_model_len}
    )
    layout = config.layout
    return Plan(
        job=spec.name,
        model=spec.model.path,
        hardware=f"{machine.count} x {machine.name}" if machine.count > 1 else machine.name,
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
        kv_pool_bytes=config.kv_pool_bytes,
        kv_bytes_per_token=layout.bytes_for(1),
        kv_bytes_at={str(length): layout.bytes_for(length) for length in lengths},
        kv_capacity_tokens=config.kv_capacity_tokens,
        max_concurrency={
            str(length): round(many, 2)
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
        predicted_seconds=_predict(facts, config, machine, counts, notes),
        packing=_packing_words(spec),
        notes=notes,
    )


def _quantised_note(method: str, config: EngineConfig) -> str:
    if config.keeps_quantised:
        return f"weights stay in {method} as published; products are in {config.dtype}"
    return f"weights are published in {method} and expanded to {config.dtype}"


def _predict(
    facts: ModelFacts,
    config: EngineConfig,
    machine: Hardware,
    counts: RowCounts,
    notes: list[str],
) -> float | None:
    """Seconds by the roofline; None when tokens or rates are not known."""
    if config.misfit is not None or counts.prompt_tokens is None or not counts.rows:
        return None
    if counts.output_tokens is None:
        return None
    if machine.bf16_flops_per_s is not None and machine.bandwidth_bytes_per_s is not None:
        rates = Rates(
            flops_per_s=machine.bf16_flops_per_s * machine.count,
            bytes_per_s=machine.bandwidth_bytes_per_s * machine.count,
        )
        notes.append("time is a bound from the data sheet's rates, not a measurement")
    elif config.device == "cpu":
        rates = measure_cpu_rates(config.dtype)
        notes.append("time is a lower bound from a short measurement of this machine")
    else:
        return None
    work = Workload(
        prompt_tokens=counts.prompt_tokens,
        output_tokens=counts.output_tokens,
        num_rows=counts.rows,
        concurrency=min(config.max_num_seqs, counts.rows),
        active_params=facts.active_params,
        weight_bytes=config.memory.weights_bytes * config.placement.tensor,
        kv_token_bytes=config.layout.token_bytes,
    )
    return predict_seconds(work, rates)


def _packing_words(spec: JobSpec) -> str:
    if spec.engine.order == "input":
        return "input order"
    return (
        "shared prefixes together, long prompts mixed with long completions, within "
        f"{spec.engine.window_rows:,} rows of the oldest unfinished one"
    )
