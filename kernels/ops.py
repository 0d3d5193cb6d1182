"""The signature of every op. A back end is one `Ops` value; nothing is dispatched at call time.

Shapes: T tokens, G sequences of a group, Q queries, L keys (padded), H query heads, K kv heads, D
head dim, N no-rope width of a head, R rope width, W value width, C latent width, M model width, F
ffn width, E experts, A active experts, V vocabulary, P pages, B tokens per page, I/O in/out
features of a linear. Activations have the model's dtype unless said otherwise; every op returns
new tensors except where it says "in place".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import torch

from batchmla.kernels.groups import Groups
from batchmla.kernels.quant import CodePanels, Quantised, Scheme
from batchmla.kernels.script_ops import WritesScriptOp

if TYPE_CHECKING:
    from batchmla.kernels.block_sparse_ops import BlockSparseOps
    from batchmla.kernels.hybrid_ops import HybridOps
    from batchmla.kernels.kda_ops import KdaOps
    from batchmla.kernels.sparse_ops import Record, SparseOps


class PackKind(StrEnum):
    """What a weight is multiplied by; the back end lays it out for that."""

    PLAIN = "plain"  # norms, embeddings: kept as they are
    LINEAR = "linear"  # [O, I]
    LOGITS = "logits"  # [V, M], result in float32
    LATENT = "latent"  # kv_b_proj [H*(N+W), C]: whole for expansion, per head for absorption
    EXPERTS_UP = "experts_up"  # [E, 2*F, M], gate rows first
    EXPERTS_DOWN = "experts_down"  # [E, M, F]


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as its back end wants it. `plain` is there when the form keeps or needs the
    original."""

    kind: PackKind
    shape: tuple[int, ...]
    plain: torch.Tensor | None = None
    laid_out: tuple[torch.Tensor, ...] = ()
    panels: torch.Tensor | None = None  # for compiled kernels
    quantised: Quantised | None = None
    code_panels: CodePanels | None = None  # for compiled kernels

    @property
    def is_compiled(self) -> bool:
        """Whether compiled kernels read it."""
        return self.panels is not None or self.code_panels is not None

    @property
    def codes(self) -> Quantised | CodePanels | None:
        """What it keeps of a quantised weight."""
        return self.quantised if self.code_panels is None else self.code_panels


class RopeLayout(StrEnum):
    """Which elements of a head form a pair that is rotated."""

    INTERLEAVED = "interleaved"  # (2i, 2i+1)
    HALVES = "halves"  # (i, i + R/2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaDims:
    """The widths of one rank's MLA heads; `scale` multiplies the scores."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    scale: float


class Scoring(StrEnum):
    """How a router's logits become scores."""

    SIGMOID = "sigmoid"  # each expert by itself
    SOFTMAX = "softmax"  # over all experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDims:
    """How experts are chosen (DeepSeek-V3 report, eq. 12-16; DeepSeek-V2 report, section 2.2.2).

    A group ranks by the sum of its `group_best` best experts: 1 is its maximum.
    """

    active: int
    normalise: bool
    scale: float
    groups: int = 1
    kept_groups: int = 1
    scoring: Scoring = Scoring.SIGMOID
    group_best: int = 2


class PackOp(Protocol):
    def __call__(self, kind: PackKind, weight: torch.Tensor | Quantised) -> Packed:
        """Lays `weight` out; the caller drops the original, which is kept only if needed.

        Codes may be laid out where they lie. What a back end does not read quantised it expands.
        """
        ...


class PackedBytesOp(Protocol):
    def __call__(self, kind: PackKind, shape: tuple[int, ...], dtype: torch.dtype | Scheme) -> int:
        """Bytes that `pack` leaves in memory for a weight on a CPU, the original included."""
        ...


class LinearOp(Protocol):
    def __call__(
        self, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """x·Wᵀ + b → [T, O]; for LOGITS the sums stay in float32."""
        ...


class NormOp(Protocol):
    def __call__(self, x_TM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
        """w · x / sqrt(mean(x²) + eps) over the last dimension, float32 inside."""
        ...


class AddNormOp(Protocol):
    def __call__(
        self,
        x_TM: torch.Tensor,
        residual_TM: torch.Tensor,
        weight_M: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); the sum is rounded to the dtype before the norm."""
        ...


class RopeOp(Protocol):
    def __call__(
        self, x_THR: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, layout: RopeLayout
    ) -> None:
        """Rotates x in place; cos and sin are float32 [T, R/2]; x may be a strided view of a
        row."""
        ...


class WriteOp(Protocol):
    def __call__(
        self, cache_PBW: torch.Tensor, slots_T: torch.Tensor, rows_TW: torch.Tensor
    ) -> None:
        """Writes rows into the flat cache rows `slots`, in place."""
        ...


class WriteLatentOp(Protocol):
    def __call__(
        self,
        cache_PBW: torch.Tensor,
        slots_T: torch.Tensor,
        latent_TX: torch.Tensor,
        weight_C: torch.Tensor,
        eps: float,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
    ) -> None:
        """Norms the first C of [T, C+R], rotates the last R (interleaved), writes the rows in
        place."""
        ...


class GqaOp(Protocol):
    def __call__(
        self,
        q_THD: torch.Tensor,
        key_PBW: torch.Tensor,
        value_PBW: torch.Tensor,
        groups: Groups,
        scale: float,
        record: "Record | None" = None,
    ) -> torch.Tensor:
        """softmax(scale · q kᵀ + bias) v over the cached rows, kv head h·K/H for head h → [T,
        H*D]. With a `record` both caches hold bytes."""
        ...


class MlaOp(Protocol):
    def __call__(
        self,
        q_THD: torch.Tensor,
        cache_PBW: torch.Tensor,
        kv_b: Packed,
        absorbed: Groups,
        expanded: Groups,
        dims: MlaDims,
        record: "Record | None" = None,
    ) -> torch.Tensor:
        """Attention over cached latents → [T, H*W]; q is [N ‖ R] a head, rotated.

        Groups of `absorbed` stay in latent space: q̃ = UKᵀ q_nope, s = scale (q̃·c + q_pe·k_pe),
        z = Σ p c, o = UV z. Groups of `expanded` make keys and values by kv_b · c first. Both give
        the same numbers. With a `record` the cache holds bytes.
        """
        ...


class RouteOp(Protocol):
    def __call__(
        self,
        x_TM: torch.Tensor,
        weight_EM: torch.Tensor,
        bias_E: torch.Tensor | None,
        dims: RouterDims,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights_TA float32, ids_TA int64): scores s in float32; chosen by s + bias inside the
        groups that rank highest, the others at -inf; weighted by s, normalised, scaled.

        DeepSeek-V2 masks with 0 instead: the same sum, since softmax scores are never below 0 and
        an expert that only ties with a masked one weighs 0."""
        ...


class ExpertsOp(Protocol):
    def __call__(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
    ) -> torch.Tensor:
        """Σ_a weight_a · down_a( silu(gate_a x) · (up_a x) ) → [T, M]."""
        ...


class ActMulOp(Protocol):
    def __call__(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """silu(first half) · second half of [T, 2*F] → [T, F], float32 inside."""
        ...


class AddOp(Protocol):
    def __call__(self, x_TM: torch.Tensor, y_TM: torch.Tensor) -> torch.Tensor:
        """x + y → [T, M]."""
        ...


class SampleOp(Protocol):
    def __call__(
        self,
        logits_NV: torch.Tensor,
        *,
        temperature_N: torch.Tensor,
        top_k_N: torch.Tensor,
        top_p_N: torch.Tensor,
        min_p_N: torch.Tensor,
        uniform_N: torch.Tensor,
    ) -> torch.Tensor:
        """ids_N int64, drawn from float32 logits by the rows' random numbers in [0, 1).

        `top_k` is int64, the others float64. Filters that are off: top_k 0, top_p 1, min_p 0.
        """
        ...


class BestOp(Protocol):
    def __call__(self, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids_N int64, is_finite_N bool) of float32 logits: argmax, ties to the lowest id, and
        whether all logits of the row are finite; only then does its id count."""
        ...


def add(x_TM: torch.Tensor, y_TM: torch.Tensor) -> torch.Tensor:
    """`AddOp` by torch."""
    return x_TM + y_TM


def best(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`BestOp` by torch."""
    return torch.argmax(logits_NV, dim=1), torch.isfinite(logits_NV).all(dim=1)


class ReadsPagesOp(Protocol):
    def __call__(self, dtype: torch.dtype, widths: Sequence[int]) -> bool:
        """Whether attention over keys and values of these widths takes `Spans`."""
        ...


def reads_no_pages(dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """A back end that wants groups."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One back end."""

    name: str
    pack: PackOp
    packed_bytes: PackedBytesOp
    linear: LinearOp
    norm: NormOp
    add_norm: AddNormOp
    rope: RopeOp
    write: WriteOp
    write_latent: WriteLatentOp
    gqa: GqaOp
    mla: MlaOp
    route: RouteOp
    experts: ExpertsOp
    act_mul: ActMulOp
    sample: SampleOp
    sparse: "SparseOps"
    hybrid: "HybridOps"
    kda: "KdaOps"
    blocks: "BlockSparseOps"
    reads_pages: ReadsPagesOp = reads_no_pages
    add: AddOp = add
    best: BestOp = best
    write_script: WritesScriptOp | None = None
