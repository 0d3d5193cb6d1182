"""How long a job takes, as far as its rows and the machine's times are known.

With times that were measured (by `plan --calibrate`, or by this job's last run) a prediction; with
a data sheet's rates, or two short measurements of this processor, a bound.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batchmla import kernels
from batchmla.engine.calibration import StepTimes
from batchmla.engine.config import EngineConfig
from batchmla.engine.costs import StepCosts, StepWork
from batchmla.engine.drafts import engine_costs
from batchmla.engine.exchange import exchange_of
from batchmla.engine.hardware import Hardware
from batchmla.engine.network import NETWORK_WORDS, exchange_seconds
from batchmla.engine.predict import Bounds, Forecasted, JobRows, predict
from batchmla.engine.roofline import Rates, measure_cpu_rates
from batchmla.engine.steady import LAYER_S
from batchmla.jobs.counts import RowCounts
from batchmla.kv.layout import DTYPE_BYTES

StepS = Callable[[StepWork], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTime:
    """`exchange_seconds`: the part in which devices only talk to each other."""

    seconds: float
    tokens_per_s: float
    mean_rows: float
    exchange_seconds: float
    is_calibrated: bool


def predict_time(
    raw_config: Mapping[str, Any],
    config: EngineConfig,
    hardware: Hardware,
    counts: RowCounts,
    times: StepTimes | None,
    notes: list[str],
) -> PredictedTime | None:
    """None where tokens or rates are not known, or nothing fits; a note says what it rests on."""
    if config.misfit is not None or counts.output_tokens is None or not counts.rows:
        return None
    if counts.lengths is None or not len(counts.lengths.prompt_tokens_R):
        return None
    clock = _clock(raw_config, config, hardware, times, notes)
    if clock is None:
        return None
    step_s, exchange_s = clock
    rows, scale = _group_rows(counts, config.placement.attention_data)
    bounds = Bounds(
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        pool_tokens=config.num_pages * config.layout.page_tokens,
    )
    whole = predict(rows, bounds, step_s)
    exchange_seconds = 0.0
    if exchange_s is not None and config.placement.num_ranks > 1:
        exchange_seconds = predict(rows, bounds, exchange_s).seconds * scale
    return _told(whole, scale, counts, exchange_seconds, is_calibrated=times is not None)


def _clock(
    raw_config: Mapping[str, Any],
    config: EngineConfig,
    hardware: Hardware,
    times: StepTimes | None,
    notes: list[str],
) -> tuple[StepS, StepS | None] | None:
    """Seconds of a step in which every group does the same, and those of its exchange."""
    costs = engine_costs(raw_config, config)
    if times is not None:
        notes.append("time is predicted from steps that this machine was measured to take")
        return (lambda work: times.seconds(work, costs)), None
    if config.device == "cpu":
        rates = measure_cpu_rates(config.dtype)
        notes.append("time is a lower bound from a short measurement of this machine")
        return (lambda work: costs.separate_step_s(work, rates)), None
    found = _sheet_clock(raw_config, config, hardware, costs)
    if found is not None:
        notes.append("time is a bound from the data sheet's rates, not a measurement")
    if found is not None and hardware.num_machines > 1:
        notes.append(NETWORK_WORDS)
    return found


def _told(
    whole: Forecasted,
    scale: float,
    counts: RowCounts,
    exchange_seconds: float,
    *,
    is_calibrated: bool,
) -> PredictedTime:
    seconds = whole.seconds * scale
    return PredictedTime(
        seconds=seconds,
        tokens_per_s=(counts.output_tokens or 0) / seconds if seconds else 0.0,
        mean_rows=whole.mean_rows,
        exchange_seconds=exchange_seconds,
        is_calibrated=is_calibrated,
    )


def _group_rows(counts: RowCounts, num_groups: int) -> tuple[JobRows, float]:
    """The rows of one attention group, and by how much its time has to be scaled for those whose
    lengths are not kept."""
    assert counts.lengths is not None and counts.rows
    reusable, prompt_tokens = counts.reusable_tokens or 0, counts.prompt_tokens or 0
    rows = JobRows(
        prompt_tokens_R=counts.lengths.prompt_tokens_R,
        output_tokens_R=counts.lengths.output_tokens_R,
        cached=min(1.0, reusable / prompt_tokens) if prompt_tokens else 0.0,
    )
    good_rows = counts.rows - (counts.rows_failing or 0)
    return rows.every(num_groups), max(1.0, good_rows / rows.count)


def _sheet_clock(
    raw_config: Mapping[str, Any], config: EngineConfig, hardware: Hardware, costs: StepCosts
) -> tuple[StepS, StepS] | None:
    """Seconds of a step in which every group does `work`, and those of its exchange, by the data
    sheet; None of unknown devices."""
    flops, read = hardware.bf16_flops_per_s, hardware.bandwidth_bytes_per_s
    if flops is None or read is None:
        return None
    placement = config.placement
    rates = Rates(flops_per_s=flops * placement.num_ranks, bytes_per_s=read * placement.num_ranks)
    ops, groups = kernels.load(config.backend), placement.attention_data
    exchange = exchange_of(raw_config, ops, DTYPE_BYTES[config.dtype])

    def exchange_s(work: StepWork) -> float:
        return exchange_seconds(exchange, placement, work.tokens, work.sampled, hardware)

    def step_s(work: StepWork) -> float:
        every = StepWork(
            tokens=groups * work.tokens,
            sampled=groups * work.sampled,
            prompt_pairs=groups * work.prompt_pairs,
            decode_pairs=groups * work.decode_pairs,
            kv_tokens=groups * work.kv_tokens,
        )
        return costs.serial_step_s(every, rates) + exchange_s(work) + LAYER_S * exchange.num_layers

    return step_s, exchange_s
