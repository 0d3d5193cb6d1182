"""The gated delta rule of the compiled kernels. Shapes: see `batchmla.kernels.kda_ops`."""

import ctypes

import numpy as np
import torch

from batchmla.kernels.cpu.kda import unit
from batchmla.kernels.cpu.native.calls import Calls
from batchmla.kernels.kda_ops import LaneRows
from batchmla.kernels.ops import Ops

WIDTH_UNIT, MAX_WIDTH = 16, 256


class _Delta(ctypes.Structure):
    """`Delta` of delta.c."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "keep", "beta", "out", "states", "starts", "lanes",
                         "is_first")
        ),
        *((name, ctypes.c_long) for name in ("sequences", "heads", "width")),
    ]  # fmt: skip


def is_served(q_THD: torch.Tensor, state_LHX: torch.Tensor) -> bool:
    """Heads of whole vector registers that fit a thread's stack, and states as they lie in a
    cache."""
    width = q_THD.shape[2]
    is_plain = state_LHX.dtype == torch.float32 and state_LHX.is_contiguous()
    return q_THD.device.type == "cpu" and is_plain and width % WIDTH_UNIT == 0 < width <= MAX_WIDTH


class NativeDelta:
    """delta."""

    def __init__(self, library: Calls, plain: Ops) -> None:
        self._library = library
        self._plain = plain

    def delta(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        decay_THD: torch.Tensor,
        beta_TH: torch.Tensor,
        state_LHX: torch.Tensor,
        rows: LaneRows,
    ) -> torch.Tensor:
        """Token by token: its numbers depend on its sequence only, wherever chunks are cut."""
        if not is_served(q_THD, state_LHX):
            plain = self._plain.kda.delta
            return plain(q_THD, k_THD, v_THD, decay_THD, beta_TH, state_LHX, rows)
        width = q_THD.shape[2]
        q_THD, k_THD = unit(q_THD, width**-0.5).contiguous(), unit(k_THD).contiguous()
        v_THD, keep_THD = v_THD.float().contiguous(), decay_THD.exp().contiguous()
        beta_TH, out_THD = beta_TH.contiguous(), torch.empty_like(q_THD)
        assert keep_THD.dtype == beta_TH.dtype == torch.float32, f"{keep_THD.dtype} decays"
        starts_S1 = np.ascontiguousarray(rows.starts_S1, np.int64)
        lanes_S = np.ascontiguousarray(rows.lanes_S, np.int64)
        is_first_S = np.ascontiguousarray(rows.is_first_S, np.uint8)
        job = _Delta(
            q=q_THD.data_ptr(), k=k_THD.data_ptr(), v=v_THD.data_ptr(), keep=keep_THD.data_ptr(),
            beta=beta_TH.data_ptr(), out=out_THD.data_ptr(), states=state_LHX.data_ptr(),
            starts=starts_S1.ctypes.data, lanes=lanes_S.ctypes.data,
            is_first=is_first_S.ctypes.data, sequences=len(lanes_S), heads=q_THD.shape[1],
            width=width,
        )  # fmt: skip
        self._library.bmla_delta(ctypes.byref(job), torch.get_num_threads())
        return out_THD
