"""The time of a step as a sum over what it does, with factors fitted to steps that were timed.

A step takes

    fixed + a · tokens + b · sampled rows + c · bytes of weights + d · prompt pairs + e · rows read

where a token stands for the flops of its linears, and every factor is at least 0. The sum, not the
slower of flops and bytes, is what processors were measured to follow; where both overlap, the fit
gives one of them less.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchmla.engine.costs import StepCosts, StepWork
from batchmla.engine.meter import TimedStep

Floats = npt.NDArray[np.float64]

FEWEST_STEPS = 12
_FAR_OFF = 2.0  # a step that took so many times what the fit says was disturbed
_ROUNDS = 3  # fits, each without the disturbed steps of the one before
_SWEEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds for each of the parts; `loop_share`: what the engine's loop adds to its steps."""

    fixed_s: float
    token_s: float
    sampled_s: float
    weight_byte_s: float
    prompt_pair_s: float
    kv_token_s: float
    loop_share: float = 0.0

    def seconds(self, work: StepWork, costs: StepCosts) -> float:
        """Of one step, the loop around it included."""
        return (1 + self.loop_share) * (
            self.fixed_s
            + self.token_s * work.tokens
            + self.sampled_s * work.sampled
            + self.weight_byte_s * costs.weight_bytes(work.tokens)
            + self.prompt_pair_s * work.prompt_pairs
            + self.kv_token_s * work.kv_tokens
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def fit(samples: Sequence[TimedStep], costs: StepCosts) -> StepTimes | None:
    """The factors with the least relative error, scaled so that all steps together take what they
    took, disturbed ones included; None of too few steps."""
    if len(samples) < FEWEST_STEPS:
        return None
    parts_NF = np.array([_parts(each.work, costs) for each in samples], np.float64)
    seconds_N = np.array([each.seconds for each in samples], np.float64)
    is_calm_N = np.ones(len(samples), bool)
    factors_F = np.zeros(parts_NF.shape[1])
    for _ in range(_ROUNDS):
        scaled_NF = parts_NF[is_calm_N] / seconds_N[is_calm_N, None]
        factors_F = least_squares(scaled_NF, np.ones(len(scaled_NF)))
        said_N = parts_NF @ factors_F
        is_calm_N = seconds_N < _FAR_OFF * said_N
        if is_calm_N.sum() < FEWEST_STEPS:
            break
    factors_F *= seconds_N.sum() / max(float((parts_NF @ factors_F).sum()), 1e-12)
    return StepTimes(
        fixed_s=float(factors_F[0]),
        token_s=float(factors_F[1]),
        sampled_s=float(factors_F[2]),
        weight_byte_s=float(factors_F[3]),
        prompt_pair_s=float(factors_F[4]),
        kv_token_s=float(factors_F[5]),
    )


def least_squares(parts_NF: Floats, wanted_N: Floats) -> Floats:
    """The factors >= 0 that bring `parts · factors` closest to `wanted`, by coordinate descent."""
    scale_F = np.sqrt((parts_NF**2).sum(axis=0))
    scale_F[scale_F == 0] = 1.0
    unit_NF = parts_NF / scale_F
    gram_FF, aim_F = unit_NF.T @ unit_NF, unit_NF.T @ wanted_N
    found_F = np.zeros(len(aim_F))
    for _ in range(_SWEEPS):
        before_F = found_F.copy()
        for place in range(len(found_F)):
            if gram_FF[place, place] > 0:
                rest = aim_F[place] - gram_FF[place] @ found_F
                found_F[place] = max(0.0, found_F[place] + rest / gram_FF[place, place])
        if np.abs(found_F - before_F).max() <= 1e-9 * max(1e-12, np.abs(found_F).max()):
            break
    result_F: Floats = found_F / scale_F
    return result_F


def _parts(work: StepWork, costs: StepCosts) -> tuple[float, ...]:
    return (
        1.0,
        work.tokens,
        work.sampled,
        costs.weight_bytes(work.tokens),
        work.prompt_pairs,
        work.kv_tokens,
    )
