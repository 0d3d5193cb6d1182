"""The signature of the ops that DeepSeek-V4 adds (DeepSeek-V4 report, section 2).

Shapes as in `batchmla.kernels.ops`, and: N rows of a group, D width of a row that is key and value
in one, W tokens of a window, K entries, X rows that lie in one tensor, J streams.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from batchmla.kernels.ops import Packed
from batchmla.kernels.sparse_ops import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridRows:
    """What N rows read: of `window_NW`, places among X rows, the first `window_count_N`; of
    `slots_NK`, flat rows of the cache, the first `entry_count_N`.

    Places beyond the counts may be read, and their values must be finite, but do not count.
    `slots_NK` is None where no row reads entries.
    """

    window_NW: torch.Tensor
    window_count_N: torch.Tensor
    slots_NK: torch.Tensor | None = None
    entry_count_N: torch.Tensor | None = None


class PoolOp(Protocol):
    def __call__(self, values_ENC: torch.Tensor, gates_ENC: torch.Tensor) -> torch.Tensor:
        """Σ_n softmax_n(gates) · values → [E, C], float32; a gate of -inf leaves its value out."""
        ...


class HybridAttendOp(Protocol):
    def __call__(
        self,
        q_NHD: torch.Tensor,
        window_XD: torch.Tensor,
        entries_PBD: torch.Tensor | None,
        rows: HybridRows,
        sink_H: torch.Tensor,
        scale: float,
        record: Record | None,
    ) -> torch.Tensor:
        """softmax over window, entries and a sink that adds exp(sink) to the sum only → [N, H, D].

        Entries are plain rows or, with a `record`, bytes; sinks are float32."""
        ...


class RouteScoresOp(Protocol):
    def __call__(
        self,
        logits_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
        ids_TA: torch.Tensor | None,
        active: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights_TA, ids_TA) of scores s = sqrt(softplus(logits)), float32: the `ids` given, or
        the largest s + bias; weighted by s, normalised, scaled."""
        ...


class ClampedActMulOp(Protocol):
    def __call__(self, gate_up_TF: torch.Tensor, limit: float) -> torch.Tensor:
        """silu(min(gate, limit)) · clamp(up, ±limit) of [T, 2*F] → [T, F], float32 inside."""
        ...


class ClampedExpertsOp(Protocol):
    def __call__(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
        limit: float,
    ) -> torch.Tensor:
        """Σ_a weight_a · down_a( clamped_act_mul(up_a x) ) → [T, M]."""
        ...


class HyperWeightsOp(Protocol):
    def __call__(
        self,
        mixed_TX: torch.Tensor,
        base_X: torch.Tensor,
        scale_3: torch.Tensor,
        num_streams: int,
        num_rounds: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(pre_TJ, post_TJ, mix_TJJ) of [T, 2J + J²], float32: sigmoid + eps, 2 sigmoid, and a
        matrix whose rows and columns are scaled to 1 in turn `num_rounds` times (Sinkhorn)."""
        ...


class GroupLinearOp(Protocol):
    def __call__(self, x_TGX: torch.Tensor, weight_GOX: torch.Tensor) -> torch.Tensor:
        """Each of G groups through its own matrix → [T, G, O]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridOps:
    """One back end's."""

    pool: PoolOp
    attend: HybridAttendOp
    route_scores: RouteScoresOp
    clamped_act_mul: ClampedActMulOp
    clamped_experts: ClampedExpertsOp
    hyper_weights: HyperWeightsOp
    group_linear: GroupLinearOp
