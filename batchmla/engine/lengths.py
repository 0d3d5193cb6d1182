"""How long completions turn out, and how likely a running one is to go on: learned while running.

A completion is measured by its ratio to what was expected of it, in bins of a sixteenth of a
doubling. Of each bin is known how many ended there; those that still run count as having come so
far (the product-limit estimate), so that the short ones, which end first, do not bias it.
"""

import numpy as np
import numpy.typing as npt

from batchmla.engine.sequence import Sequence

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PER_DOUBLING = 16
_LOWEST = -10 * _PER_DOUBLING  # bins from a thousandth of the expectation to a thousand times it
_NUM_BINS = 20 * _PER_DOUBLING + 1
_PRIOR_COUNT = 2  # completions as long as expected, before any has ended
_HALVE_AT = 4096  # ended completions; old ones fade then
_FADED = 0.1  # of a completion is left


class LengthEstimator:
    """The expected length of a completion: `prior_tokens`, soon the experience with finished ones.

    Experience is the mean plus the mean deviation, both as running averages in which completions
    fade once there are `memory` of them.
    """

    def __init__(self, prior_tokens: int = 512, *, enough: int = 8, memory: int = 256) -> None:
        self._prior_tokens = prior_tokens
        self._enough = enough
        self._memory = memory
        self._count = 0
        self._mean = 0.0
        self._deviation = 0.0
        self._ended_B = np.zeros(_NUM_BINS)
        self._ended_B[-_LOWEST] = _PRIOR_COUNT

    def observe(self, sequence: Sequence) -> None:
        """Learns from a finished completion."""
        num_generated = sequence.num_generated
        expected = sequence.prompt.expected_tokens or self.expected_tokens
        last = int(np.ceil(_PER_DOUBLING * np.log2(max(num_generated, 1) / expected)))
        self._ended_B[min(max(last - _LOWEST, 0), _NUM_BINS - 1)] += 1
        if self._ended_B.sum() >= _HALVE_AT:
            self._ended_B /= 2
            self._ended_B[self._ended_B < _FADED] = 0.0
        self._count += 1
        share = 1 / min(self._count, self._memory)
        self._mean += share * (num_generated - self._mean)
        self._deviation += share * (abs(num_generated - self._mean) - self._deviation)

    @property
    def expected_tokens(self) -> int:
        if self._count < self._enough:
            return self._prior_tokens
        return max(1, round(self._mean + self._deviation))

    def survival(self, generated_S: Floats, expected_S: Floats) -> Floats:
        """P(a completion goes on beyond the lower end of each bin), given where the running ones
        stand; [bins]. 0 where none of those that ended went on.
        """
        running_B = np.bincount(bins(generated_S / expected_S), minlength=_NUM_BINS)
        at_risk_B = np.cumsum((self._ended_B + running_B)[::-1])[::-1]
        hazard_B = np.divide(
            self._ended_B, at_risk_B, out=np.zeros(_NUM_BINS), where=self._ended_B > 0
        )
        survival_B: Floats = np.cumprod(1 - hazard_B)
        survival_B[np.flatnonzero(self._ended_B)[-1] :] = 0.0
        return survival_B


def bins(ratio: Floats) -> Ints:
    """The bin of each ratio of generated to expected tokens; any shape."""
    with np.errstate(divide="ignore"):
        places = np.floor(_PER_DOUBLING * np.log2(ratio)) - _LOWEST
    found: Ints = np.clip(places, 0, _NUM_BINS - 1).astype(np.int64)
    return found
