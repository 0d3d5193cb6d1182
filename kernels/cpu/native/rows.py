"""Row-wise ops of the compiled kernels; other dtypes and layouts go to the torch forms. Shapes: see
`batchmla.kernels.ops`."""

import ctypes

import torch

from batchmla.kernels.cpu.native.calls import Calls
from batchmla.kernels.ops import Ops, RopeLayout, RouterDims, Scoring


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_served(*tensors: torch.Tensor) -> bool:
    return all(t.dtype == torch.bfloat16 and t.stride(-1) == 1 for t in tensors)


def _are_angles(*tensors: torch.Tensor) -> bool:
    return all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


class _Router(ctypes.Structure):
    """`Router` of route.c."""

    _fields_ = [
        ("experts", ctypes.c_long),
        ("active", ctypes.c_long),
        ("groups", ctypes.c_long),
        ("kept_groups", ctypes.c_long),
        ("group_best", ctypes.c_long),
        ("is_softmax", ctypes.c_int),
        ("normalises", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


class NativeRows:
    """norm, add_norm, act_mul, add, rope, write, write_latent, route and best."""

    def __init__(self, library: Calls, plain: Ops) -> None:
        self._library = library
        self._plain = plain

    def norm(self, x_TM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm."""
        if x_TM.dim() != 2 or not _is_served(x_TM, weight_M):
            return self._plain.norm(x_TM, weight_M, eps)
        return self._norm(x_TM, None, None, weight_M, eps)

    def add_norm(
        self, x_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual addition, then RMSNorm."""
        is_served = residual_TM.is_contiguous() and x_TM.dim() == 2
        if not is_served or not _is_served(x_TM, residual_TM, weight_M):
            return self._plain.add_norm(x_TM, residual_TM, weight_M, eps)
        total_TM = self._library.empty(*residual_TM.shape, dtype=residual_TM.dtype)
        return self._norm(x_TM, residual_TM, total_TM, weight_M, eps), total_TM

    def _norm(
        self,
        x_TM: torch.Tensor,
        residual_TM: torch.Tensor | None,
        total_TM: torch.Tensor | None,
        weight_M: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        out_TM = self._library.empty(*x_TM.shape, dtype=x_TM.dtype)
        self._library.bmla_norm(
            _pointer(x_TM), x_TM.stride(0), _pointer(residual_TM),
            _pointer(total_TM), _pointer(weight_M), *x_TM.shape,
            eps, _pointer(out_TM), torch.get_num_threads(),
        )  # fmt: skip
        return out_TM

    def act_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """silu of the first half times the second."""
        if gate_up_TF.dim() != 2 or not _is_served(gate_up_TF):
            return self._plain.act_mul(gate_up_TF)
        num_rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
        out_TF = self._library.empty(num_rows, width, dtype=gate_up_TF.dtype)
        self._library.bmla_act_mul(
            _pointer(gate_up_TF), gate_up_TF.stride(0), num_rows, width, _pointer(out_TF),
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TF

    def add(self, x_TM: torch.Tensor, y_TM: torch.Tensor) -> torch.Tensor:
        """x + y."""
        is_served = x_TM.dim() == 2 and x_TM.shape == y_TM.shape and _is_served(x_TM, y_TM)
        if not (is_served and x_TM.is_contiguous() and y_TM.is_contiguous()):
            return self._plain.add(x_TM, y_TM)
        out_TM = self._library.empty(*x_TM.shape, dtype=x_TM.dtype)
        self._library.bmla_add(
            _pointer(x_TM), _pointer(y_TM), *x_TM.shape, _pointer(out_TM), torch.get_num_threads()
        )
        return out_TM

    def rope(
        self,
        x_THR: torch.Tensor,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
        layout: RopeLayout,
    ) -> None:
        """Rotates in place."""
        if not _is_served(x_THR) or not _are_angles(cos_TR, sin_TR):
            self._plain.rope(x_THR, cos_TR, sin_TR, layout)
            return
        rows, heads, width = x_THR.shape
        self._library.bmla_rope(
            _pointer(x_THR), rows, heads, x_THR.stride(0), x_THR.stride(1),
            _pointer(cos_TR), _pointer(sin_TR), width,
            layout is RopeLayout.HALVES, torch.get_num_threads(),
        )  # fmt: skip

    def write(self, cache_PBW: torch.Tensor, slots_T: torch.Tensor, rows_TW: torch.Tensor) -> None:
        """One copy a row."""
        if rows_TW.dtype != cache_PBW.dtype or rows_TW.stride(1) != 1:
            self._plain.write(cache_PBW, slots_T, rows_TW)
            return
        size = rows_TW.element_size()
        self._library.bmla_write(
            _pointer(cache_PBW), _pointer(slots_T), _pointer(rows_TW),
            rows_TW.stride(0) * size, len(rows_TW), rows_TW.shape[1] * size,
            torch.get_num_threads(),
        )  # fmt: skip

    def write_latent(
        self,
        cache_PBW: torch.Tensor,
        slots_T: torch.Tensor,
        latent_TX: torch.Tensor,
        weight_C: torch.Tensor,
        eps: float,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
    ) -> None:
        """norm ‖ rope into the cache."""
        if not _is_served(cache_PBW, latent_TX, weight_C) or not _are_angles(cos_TR, sin_TR):
            self._plain.write_latent(cache_PBW, slots_T, latent_TX, weight_C, eps, cos_TR, sin_TR)
            return
        latent, width = len(weight_C), latent_TX.shape[1] - len(weight_C)
        self._library.bmla_write_latent(
            _pointer(cache_PBW), _pointer(slots_T), _pointer(latent_TX),
            latent_TX.stride(0), len(latent_TX), _pointer(weight_C),
            latent, eps, _pointer(cos_TR), _pointer(sin_TR),
            width, torch.get_num_threads(),
        )  # fmt: skip

    def route(
        self,
        x_TM: torch.Tensor,
        weight_EM: torch.Tensor,
        bias_E: torch.Tensor | None,
        dims: RouterDims,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every token by itself; of equal choices the lowest expert."""
        if not (_is_served(x_TM) and x_TM.is_contiguous() and weight_EM.is_contiguous()):
            return self._plain.route(x_TM, weight_EM, bias_E, dims)
        num_tokens, width = x_TM.shape
        weights_TA = self._library.empty(num_tokens, dims.active, dtype=torch.float32)
        ids_TA = self._library.empty(num_tokens, dims.active, dtype=torch.int64)
        router = _Router(
            experts=len(weight_EM),
            active=dims.active,
            groups=dims.groups,
            kept_groups=dims.kept_groups,
            group_best=dims.group_best,
            is_softmax=dims.scoring is Scoring.SOFTMAX,
            normalises=dims.normalise,
            scale=dims.scale,
        )
        failed = self._library.bmla_route(
            ctypes.byref(router), _pointer(x_TM), num_tokens, width,
            _pointer(weight_EM), _pointer(bias_E), _pointer(weights_TA), _pointer(ids_TA),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the scores of the router")
        return weights_TA, ids_TA

    def best(self, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over the logits."""
        if logits_NV.dtype != torch.float32 or logits_NV.stride(1) != 1 or logits_NV.is_cuda:
            return self._plain.best(logits_NV)
        num_rows, count = logits_NV.shape
        ids_N = torch.empty(num_rows, dtype=torch.int64)
        is_finite_N = torch.empty(num_rows, dtype=torch.bool)
        self._library.bmla_best(
            _pointer(logits_NV), logits_NV.stride(0), num_rows, count, _pointer(ids_N),
            _pointer(is_finite_N), torch.get_num_threads(),
        )  # fmt: skip
        return ids_N, is_finite_N
