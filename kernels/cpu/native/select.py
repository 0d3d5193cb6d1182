"""The choice of keys of the compiled kernels: scores and choice in one pass over the cached keys.
Shapes: see `batchmla.kernels.sparse_ops`."""

import ctypes
from collections.abc import Sequence

import torch

from batchmla.kernels.cpu.native.calls import Calls
from batchmla.kernels.ops import Ops
from batchmla.kernels.sparse_ops import SCALE_BYTES, IndexGroup, Record

WIDTH_UNIT = 32  # of queries and keys


class _Choice(ctypes.Structure):
    """`Choice` of select.c."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("visible", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("rows", ctypes.c_long),
        ("heads", ctypes.c_long),
        ("width", ctypes.c_long),
        ("page_rows", ctypes.c_long),
        ("page_bytes", ctypes.c_long),
        ("table_width", ctypes.c_long),
        ("count", ctypes.c_long),
        ("is_shared", ctypes.c_int),
        ("has_codes", ctypes.c_int),
    ]


def is_served(q_NID: torch.Tensor, key_PBD: torch.Tensor, record: Record | None) -> bool:
    """bfloat16 queries of a multiple of 32 elements, and keys in bfloat16 or as e4m3 values with
    one factor, those of a page behind its keys."""
    width = q_NID.shape[2]
    if q_NID.dtype != torch.bfloat16 or width % WIDTH_UNIT or not key_PBD.is_contiguous():
        return False
    if record is None:
        return key_PBD.dtype == torch.bfloat16
    return record.scales_last and record.num_bytes == width + SCALE_BYTES


class NativeChoice:
    """select_keys."""

    def __init__(self, library: Calls, plain: Ops) -> None:
        self._library = library
        self._plain = plain

    def select_keys(
        self,
        q_NID: torch.Tensor,
        weights_NI: torch.Tensor,
        key_PBD: torch.Tensor,
        groups: Sequence[IndexGroup],
        count: int,
        record: Record | None,
    ) -> torch.Tensor:
        """A row's scores and choice depend on that row and its keys only."""
        if not is_served(q_NID, key_PBD, record):
            plain = self._plain.sparse.select_keys
            return plain(q_NID, weights_NI, key_PBD, groups, count, record)
        q_NID, weights_NI = q_NID.contiguous(), weights_NI.contiguous()
        slots_NK = torch.empty(len(q_NID), count, dtype=torch.int64)
        for group in groups:
            rows = slice(group.first_row, group.first_row + group.num_rows)
            self._choose(
                q_NID[rows], weights_NI[rows], key_PBD, group, slots_NK[rows], record is not None
            )
        return slots_NK

    def _choose(
        self,
        q_RID: torch.Tensor,
        weights_RI: torch.Tensor,
        key_PBD: torch.Tensor,
        group: IndexGroup,
        slots_RK: torch.Tensor,
        has_codes: bool,
    ) -> None:
        """One group, into `slots`."""
        pages_GP, visible_R = group.pages_GP.contiguous(), group.visible_N.contiguous()
        assert weights_RI.dtype == torch.float32 and pages_GP.dtype == torch.int64
        job = _Choice(
            q=q_RID.data_ptr(),
            weights=weights_RI.data_ptr(),
            pages=key_PBD.data_ptr(),
            table=pages_GP.data_ptr(),
            visible=visible_R.data_ptr(),
            slots=slots_RK.data_ptr(),
            rows=group.num_rows,
            heads=q_RID.shape[1],
            width=q_RID.shape[2],
            page_rows=key_PBD.shape[1],
            page_bytes=key_PBD.stride(0) * key_PBD.element_size(),
            table_width=pages_GP.shape[1],
            count=slots_RK.shape[1],
            is_shared=len(pages_GP) == 1,
            has_codes=has_codes,
        )
        if self._library.bmla_select(ctypes.byref(job), torch.get_num_threads()):
            raise MemoryError("no memory for the scores of keys")
