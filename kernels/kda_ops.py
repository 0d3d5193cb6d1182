"""The signature of the ops that Kimi Delta Attention adds (Kimi-Linear report, section 3).

Shapes as in `batchmla.kernels.ops`, and: S sequences of a step, L lanes, H heads of this rank, D
width of a head's keys and values alike, C channels of the convolution, W tokens that it looks back,
X rows that lie in one tensor.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from batchmla.kernels.groups import Kept

HostInts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRows:
    """Sequence s owns the rows starts[s]:starts[s+1] of T, in order, and the state in its lane.

    Where `is_first` its tokens are the sequence's first ones: whatever the lane holds is taken as
    zeros. Sequences without rows are allowed, two sequences with one lane are not.
    """

    starts_S1: HostInts
    lanes_S: HostInts
    is_first_S: npt.NDArray[np.bool_]
    kept: Kept = field(default_factory=Kept, repr=False, compare=False)


class ConvolveOp(Protocol):
    def __call__(
        self, x_XC: torch.Tensor, weight_C1W: torch.Tensor, places_WT: torch.Tensor
    ) -> torch.Tensor:
        """silu(Σ_w weight[:, 0, w] · x[places[w]]) → [T, C] in x's dtype, float32 inside."""
        ...


class GatesOp(Protocol):
    def __call__(
        self,
        forget_TX: torch.Tensor,
        write_TH: torch.Tensor,
        log_rate_H: torch.Tensor,
        bias_X: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-decays -exp(log_rate) · softplus(forget + bias) [T, H, D], strengths
        sigmoid(write) [T, H]), float32; X is H*D, head by head."""
        ...


class DeltaOp(Protocol):
    def __call__(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        decay_THD: torch.Tensor,
        beta_TH: torch.Tensor,
        state_LHX: torch.Tensor,
        rows: LaneRows,
    ) -> torch.Tensor:
        """The gated delta rule, token by token of each sequence, float32 [T, H, D].

        With q and k at length 1 (x / sqrt(Σx² + 1e-6)), q by D^-0.5 besides, and S [D key, D value]
        of a head in its lane: S ← diag(exp(decay)) S; u = beta (v - Sᵀk); S ← S + k uᵀ; the result
        is Sᵀq. States are float32, X = D*D, written in place.
        """
        ...


class GatedNormOp(Protocol):
    def __call__(
        self, x_THD: torch.Tensor, gate_THD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """RMSNorm over D, times sigmoid(gate) → [T, H, D] in the gate's dtype, float32 inside."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaOps:
    """One back end's."""

    convolve: ConvolveOp
    gates: GatesOp
    delta: DeltaOp
    gated_norm: GatedNormOp
