"""Rotary frequencies: default, llama3 and YaRN. T tokens, R rotated width (half as many angles)."""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch


class RopeKind(StrEnum):
    """How frequencies are stretched beyond the trained length."""

    DEFAULT = "default"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Everything that fixes the angles. `multiplier` scales cos and sin."""

    width: int
    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    is_truncated: bool = True  # yarn: the ramp starts and ends at whole dimensions
    multiplier: float = 1.0

    def frequencies(self) -> torch.Tensor:
        """Radians per position, float32 [R/2]."""
        exponents_R = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        plain_R = 1.0 / self.theta**exponents_R
        if self.kind is RopeKind.LLAMA3:
            return self._llama3(plain_R)
        if self.kind is RopeKind.YARN:
            return self._yarn(plain_R)
        return plain_R

    def _llama3(self, plain_R: torch.Tensor) -> torch.Tensor:
        """Short waves kept, long ones divided by the factor, a linear blend between (Llama 3.1)."""
        turns_R = self.original_positions * plain_R / (2 * math.pi)
        keep_R = (turns_R - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep_R = keep_R.clamp(0, 1)
        return (1 - keep_R) * plain_R / self.factor + keep_R * plain_R

    def _yarn(self, plain_R: torch.Tensor) -> torch.Tensor:
        """NTK-by-parts (Peng et al. 2023, eq. 21-23), with the ramp over dimension indices."""

        def dimension(turns: float) -> float:
            ratio = self.original_positions / (turns * 2 * math.pi)
            return self.width * math.log(ratio) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.width - 1)
        if low == high:
            high += 0.001
        index_R = torch.arange(self.width // 2, dtype=torch.float32)
        stretch_R = ((index_R - low) / (high - low)).clamp(0, 1)
        return plain_R / self.factor * stretch_R + plain_R * (1 - stretch_R)


def yarn_magnitude(factor: float, weight: float) -> float:
    """0.1 · weight · ln(factor) + 1, or 1 without stretching (DeepSeek's mscale)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Rope:
    """Turns positions into cos and sin; the frequencies follow the positions' device."""

    def __init__(self, spec: RopeSpec) -> None:
        self.spec = spec
        self._frequencies_R = spec.frequencies()

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), float32 [T, R/2] each."""
        if self._frequencies_R.device != positions_T.device:
            self._frequencies_R = self._frequencies_R.to(positions_T.device)
        angles_TR = positions_T[:, None].float() * self._frequencies_R
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin_()
        if self.spec.multiplier != 1.0:
            cos_TR, sin_TR = cos_TR * self.spec.multiplier, sin_TR * self.spec.multiplier
        return cos_TR, sin_TR


class NoRope(Rope):
    """For rows that keep their content wherever they stand: every angle is 0."""

    def __init__(self, width: int) -> None:
        super().__init__(RopeSpec(width=width, theta=1.0))
        self._frequencies_R.zero_()
