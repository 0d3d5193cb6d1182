"""What a run learns of its machine, kept in its summary: how long the parts of a step take.

`plan` of the same job predicts with it, as long as model, device, dtype and threads are the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchmla.engine.calibration import StepTimes, fit
from batchmla.engine.config import EngineConfig
from batchmla.engine.costs import StepCosts
from batchmla.engine.engine import EngineCore
from batchmla.engine.numerics import count_threads
from batchmla.jobs.summary import read_summary

_LEAST_S = 1e-3  # of steps, to be told from nothing


def calibration_key(model: str, config: EngineConfig, hardware_name: str) -> dict[str, Any]:
    """What the times depend on besides the steps."""
    placement = config.placement
    return {
        "model": model,
        "hardware": hardware_name,
        "backend": config.backend,
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "deterministic": config.deterministic,
        "ranks": [placement.tensor, placement.expert, placement.attention_data],
        "threads": count_threads(),
    }


def learned(
    engine: EngineCore, key: Mapping[str, Any], costs: StepCosts, engine_s: float
) -> dict[str, Any]:
    """The calibration of an engine that ran for `engine_s`; empty after too few steps."""
    times, step_s = fit(engine.meter.samples, costs), engine.stats().step_s
    if times is None or step_s < _LEAST_S:
        return {}
    loop_share = max(0.0, engine_s - step_s) / step_s
    return {**key, "times": times.to_json() | {"loop_share": loop_share}}


def last_calibration(output: Path, key: Mapping[str, Any]) -> StepTimes | None:
    """What this job's last run learned, if it was the same engine on the same machine."""
    last = read_summary(output)
    if last is None or not last.calibration:
        return None
    found = dict(last.calibration)
    times = found.pop("times", None)
    if found != dict(key) or not isinstance(times, Mapping):
        return None
    try:
        return StepTimes(**times)
    except TypeError:
        return None  # of another version
