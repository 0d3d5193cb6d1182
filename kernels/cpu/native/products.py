"""Linears and experts of the compiled kernels. Shapes: see `batchmla.kernels.ops`.

What they do not serve (other dtypes, features that are no multiple of 32) goes to the torch forms.
"""

import ctypes
import math
from typing import Any

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.large_pages import WeightMemory
from batchmla.kernels.cpu.native.calls import Calls
from batchmla.kernels.cpu.native.quant import (
    code_bytes,
    codes_of,
    lay_out_codes,
    serves_codes,
)
from batchmla.kernels.cpu.quant import KEPT
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.ops import Ops, Packed, PackKind
from batchmla.kernels.quant import Quantised, Scheme

PANEL = 32  # outputs side by side in a packed weight
DEPTH = 32  # inputs of one tile
KINDS = (
    PackKind.LINEAR,
    PackKind.LOGITS,
    PackKind.LATENT,
    PackKind.EXPERTS_UP,
    PackKind.EXPERTS_DOWN,
)


def is_served(kind: PackKind, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a weight can be packed in panels; up and down of the same experts alike."""
    if kind not in KINDS or dtype != torch.bfloat16 or shape[-1] % DEPTH:
        return False
    unit = {PackKind.EXPERTS_UP: 2 * PANEL, PackKind.EXPERTS_DOWN: PANEL}.get(kind, 1)
    return shape[-2] % unit == 0


def lay_out(kind: PackKind, weight: torch.Tensor) -> torch.Tensor:
    """[…, O/32, I/32, 2, 16, 16, 2]; of experts' up weights a panel is 16 gates and their ups."""
    columns = weight.shape[-1]
    if kind is PackKind.EXPERTS_UP:
        rows = weight.view(len(weight), 2, -1, 16, columns).transpose(1, 2)
    else:
        rows = F.pad(weight, (0, 0, 0, -weight.shape[-2] % PANEL))
    tiles = rows.reshape(*weight.shape[:-2], -1, 2, 16, columns // DEPTH, 16, 2)
    # …, panel, half, n, k, pair, 2 → …, panel, k, half, pair, n, 2
    return tiles.movedim(-3, -5).transpose(-3, -2).contiguous()


def panel_linear(
    library: Calls, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """x·Wᵀ + b with a weight in panels."""
    assert weight.is_compiled and x_TI.dtype == torch.bfloat16, x_TI.dtype
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    is_float = weight.kind is PackKind.LOGITS
    outputs, depth = weight.shape
    dtype = torch.float32 if is_float else torch.bfloat16
    y_TO = library.empty(len(x_TI), outputs, dtype=dtype)
    library.bmla_linear(
        x_TI.data_ptr(), x_TI.stride(0), len(x_TI), *_pointers(weight), depth, outputs,
        None if bias_O is None else bias_O.data_ptr(), y_TO.data_ptr(), outputs, is_float,
        torch.get_num_threads(),
    )  # fmt: skip
    return y_TO


def _pointers(weight: Packed) -> tuple[int | None, Any]:
    """To its values and its codes, one of which it has not."""
    if weight.code_panels is not None:
        return None, ctypes.byref(codes_of(weight.code_panels, weight.shape[-1]))
    assert weight.panels is not None
    return weight.panels.data_ptr(), None


def panel_expert_linear(
    library: Calls, x_TI: torch.Tensor, weight: Packed, index: int
) -> torch.Tensor:
    """x·Wᵀ of one expert; gates come before ups."""
    panels = None if weight.panels is None else weight.panels[index]
    codes = None if weight.code_panels is None else weight.code_panels.matrix(index)
    one = Packed(weight.kind, weight.shape[1:], panels=panels, code_panels=codes)
    y_TO = panel_linear(library, x_TI, one)
    if weight.kind is not PackKind.EXPERTS_UP:
        return y_TO
    return y_TO.view(len(y_TO), -1, 2, 16).transpose(1, 2).flatten(1)


class NativeProducts:
    """pack, packed_bytes, linear and experts."""

    def __init__(self, library: Calls, plain: Ops, scratch: Scratch) -> None:
        self._library = library
        self._plain = plain
        self._scratch = scratch
        self._memory = WeightMemory()

    def packed_bytes(
        self, kind: PackKind, shape: tuple[int, ...], dtype: torch.dtype | Scheme
    ) -> int:
        """One form, latent weights plain too; outputs are padded to whole panels."""
        if isinstance(dtype, Scheme):
            if serves_codes(kind, shape, dtype):
                return code_bytes(shape, dtype)
            if kind in KEPT:
                return self._plain.packed_bytes(kind, shape, dtype)
            dtype = dtype.dtype
        if not is_served(kind, shape, dtype):
            return self._plain.packed_bytes(kind, shape, dtype)
        outputs = -(-shape[-2] // PANEL) * PANEL
        plain_bytes = 2 * math.prod(shape) if kind is PackKind.LATENT else 0
        return 2 * math.prod(shape[:-2]) * outputs * shape[-1] + plain_bytes

    def pack(self, kind: PackKind, weight: torch.Tensor | Quantised) -> Packed:
        """Panels, where they are served."""
        if isinstance(weight, Quantised):
            if weight.device.type == "cpu" and serves_codes(kind, weight.shape, weight.scheme):
                return Packed(kind, weight.shape, code_panels=lay_out_codes(kind, weight))
            if kind in KEPT:
                return self._plain.pack(kind, weight)
            weight = weight.expanded()
        if weight.device.type != "cpu" or not is_served(kind, tuple(weight.shape), weight.dtype):
            return self._plain.pack(kind, weight)
        plain = self._memory.keep(weight) if kind is PackKind.LATENT else None
        panels = self._memory.keep(lay_out(kind, weight))
        return Packed(kind, tuple(weight.shape), plain, panels=panels)

    def linear(
        self, x_TI: torch.Tensor, weight: Packed, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """x·Wᵀ + b."""
        if not weight.is_compiled:
            return self._plain.linear(x_TI, weight, bias_O)
        return panel_linear(self._library, x_TI, weight, bias_O)

    def experts(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
    ) -> torch.Tensor:
        """Every expert over the tokens it received, a token's experts summed as it chose them."""
        if not up.is_compiled or not down.is_compiled:
            return self._plain.experts(x_TM, weights_TA, ids_TA, up, down)
        assert x_TM.dtype == torch.bfloat16, x_TM.dtype
        num_tokens, width = x_TM.shape
        active, hidden = ids_TA.shape[1], down.shape[2]
        num_choices = self._library.most_rows(num_tokens) * active
        work = self._scratch.take("experts", (num_choices, 2 * width + hidden), x_TM)
        self._library.keep(work)
        out_TM = self._library.empty(num_tokens, width, dtype=x_TM.dtype)
        x_TM, weights_TA, ids_TA = x_TM.contiguous(), weights_TA.contiguous(), ids_TA.contiguous()
        failed = self._library.bmla_experts(
            x_TM.data_ptr(), num_tokens, width, hidden, up.shape[0], active, ids_TA.data_ptr(),
            weights_TA.data_ptr(), *_pointers(up), *_pointers(down), work.data_ptr(),
            out_TM.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the tables of the experts")
        return out_TM
