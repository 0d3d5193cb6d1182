"""Linears over weights laid out once for oneDNN. Shapes: see `batchmla.kernels.ops`.

bfloat16 weights on a CPU are reordered by torch's private mkldnn calls; where those are missing or
fail the probe, plain torch linears take their place and one log line says so.
"""

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.quant import KEPT, quantised_linear
from batchmla.kernels.ops import Packed, PackKind
from batchmla.kernels.quant import Quantised, Scheme

logger = logging.getLogger(__name__)

SMALL_EXPERT = 32_768  # M*F up to which all experts at once beat a loop (8 experts, 16-256 rows)
LAYOUT_ROWS = 256  # row count the layout is chosen for; measured fit for 1 to 512 rows


class Linears:
    """pack, copies and linear of one back end; decides once whether prepacking works here."""

    def __init__(self, *, lays_side_by_side: bool = True) -> None:
        """`lays_side_by_side`: small experts are kept a second time, all of a layer as one MLP."""
        self._can_prepack = self._probe()
        self._lays_side_by_side = lays_side_by_side

    @staticmethod
    def _probe() -> bool:
        """Multiplies a small prepacked weight and compares it with the plain product."""
        weight_OI = torch.linspace(-1, 1, 64 * 32).view(64, 32).to(torch.bfloat16)
        x_TI = torch.linspace(-1, 1, 3 * 32).view(3, 32).to(torch.bfloat16)
        try:
            laid_out = _reorder(weight_OI)
            y_TO = torch.ops.mkldnn._linear_pointwise(x_TI, laid_out, None, "none", [], "")
        except (AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
        else:
            if torch.allclose(
                y_TO.float(), F.linear(x_TI, weight_OI).float(), rtol=2e-2, atol=2e-2
            ):
                return True
            reason = "its products are wrong"
        logger.warning("oneDNN prepacking is off in torch %s: %s", torch.__version__, reason)
        return False

    def _prepacks(self, kind: PackKind, dtype: torch.dtype, device: torch.device) -> bool:
        return (
            self._can_prepack
            and dtype == torch.bfloat16
            and device.type == "cpu"
            and kind is not PackKind.PLAIN
        )

    def packed_bytes(
        self, kind: PackKind, shape: tuple[int, ...], dtype: torch.dtype | Scheme
    ) -> int:
        """Logits weights are float32; latent ones and small experts take two forms."""
        if isinstance(dtype, Scheme):
            if kind in KEPT:
                return dtype.nbytes(shape)
            dtype = dtype.dtype
        count = math.prod(shape)
        if kind is PackKind.LOGITS:
            return 4 * count
        is_twice = (
            kind is PackKind.LATENT
            if kind not in (PackKind.EXPERTS_UP, PackKind.EXPERTS_DOWN)
            else self._lays_side_by_side and is_small(kind, shape)
        )
        is_laid_out = self._prepacks(kind, dtype, torch.device("cpu"))
        return count * dtype.itemsize * (2 if is_twice and is_laid_out else 1)

    def pack(self, kind: PackKind, weight: torch.Tensor | Quantised) -> Packed:
        """Experts become one laid-out weight each; a latent weight keeps its plain form too.

        Small experts have one more weight, that of all of them side by side.
        """
        if isinstance(weight, Quantised):
            if kind in KEPT:
                return Packed(kind, weight.shape, quantised=weight)
            weight = weight.expanded()
        shape = tuple(weight.shape)
        if kind is PackKind.LOGITS:
            return self._pack_logits(weight)
        if not self._prepacks(kind, weight.dtype, weight.device):
            return Packed(kind, shape, plain=weight)
        if kind in (PackKind.EXPERTS_UP, PackKind.EXPERTS_DOWN):
            laid_out = tuple(_reorder(one_OI) for one_OI in weight)
            if self._lays_side_by_side and is_small(kind, shape):
                laid_out += (_reorder(side_by_side(kind, weight)),)
            return Packed(kind, shape, laid_out=laid_out)
        plain = weight if kind is PackKind.LATENT else None
        return Packed(kind, shape, plain, (_reorder(weight),))

    def _pack_logits(self, weight_VM: torch.Tensor) -> Packed:
        """float32, so that the sums leave the product unrounded; products of bfloat16 stay
        bfloat16."""
        shape = tuple(weight_VM.shape)
        wide_VM = weight_VM.float()
        if not self._prepacks(PackKind.LOGITS, weight_VM.dtype, weight_VM.device):
            return Packed(PackKind.LOGITS, shape, plain=wide_VM)
        with _Bfloat16Products():
            laid_out = _reorder(wide_VM)
        return Packed(PackKind.LOGITS, shape, laid_out=(laid_out,))

    def linear(
        self, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """x·Wᵀ + b."""
        if weight.kind is PackKind.LOGITS:
            x_TI = x_TI.float()
            if weight.laid_out:
                with _Bfloat16Products():
                    return one_linear(x_TI, weight, 0, bias_O)
        return one_linear(x_TI, weight, 0, bias_O)


def _reorder(weight_OI: torch.Tensor) -> torch.Tensor:
    """oneDNN's own layout of a weight."""
    laid_out: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight_OI.contiguous(), LAYOUT_ROWS
    )
    return laid_out


def is_small(kind: PackKind, shape: tuple[int, ...]) -> bool:
    """Whether one product over all experts can beat a loop over them, by one expert's size."""
    _, rows, columns = shape
    count = rows * columns // (2 if kind is PackKind.EXPERTS_UP else 1)
    return count <= SMALL_EXPERT


def side_by_side(kind: PackKind, weight: torch.Tensor) -> torch.Tensor:
    """[2*E*F, M], all gates first, or [M, E*F]: the experts of a layer as one MLP."""
    if kind is PackKind.EXPERTS_UP:
        return torch.cat([half.flatten(0, 1) for half in weight.chunk(2, dim=1)])
    return weight.transpose(0, 1).flatten(1)


def one_linear(
    x_TI: torch.Tensor, weight: Packed, index: int, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """x·Wᵀ + b with the weight itself or, for experts, with its part `index`."""
    if weight.quantised is not None:
        is_stack = len(weight.shape) == 3
        matrix = weight.quantised.matrix(index) if is_stack else weight.quantised
        return quantised_linear(x_TI, matrix, bias_O)
    if weight.laid_out:
        y_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TI, weight.laid_out[index], bias_O, "none", [], ""
        )
        return y_TO
    assert weight.plain is not None, f"{weight.kind} of shape {weight.shape} has no values"
    plain_OI = weight.plain[index] if weight.plain.dim() == 3 else weight.plain
    return F.linear(x_TI, plain_OI, bias_O)


class _Bfloat16Products:
    """Inside, float32 products of oneDNN round their inputs to bfloat16 and sum in float32.

    Exact for inputs that are bfloat16 already, which is what makes logits in float32 affordable.
    """

    def __enter__(self) -> None:
        self._settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        self._before = self._settings.fp32_precision
        self._settings.fp32_precision = "bf16"

    def __exit__(self, *_: object) -> None:
        self._settings.fp32_precision = self._before


def act_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up; torch computes silu in float32 inside."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)
