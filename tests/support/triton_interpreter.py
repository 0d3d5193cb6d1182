"""Triton's interpreter with right arithmetic of bfloat16 and float8; import before any launch.

The interpreter keeps bfloat16 as 16-bit integers and works on those, and rounds to float8 wrongly.
Here values are widened to float32 before every operation and rounded to nearest even after it.
Products with e2m1 rows, which it lacks, are added.
Reductions of raw bfloat16 stay wrong: kernels widen what they load.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

FLOAT8 = {
    tl.float8e4nv: (torch.float8_e4m3fn, 448.0),
    tl.float8e5: (torch.float8_e5m2, 57344.0),
}


def is_narrow(dtype: Any) -> bool:
    """Kept by the interpreter as integers."""
    return dtype == tl.bfloat16 or dtype in tuple(FLOAT8)  # pointers have no hash


def widen(handle: Any) -> Any:
    """Its values, float32 where they are narrow."""
    dtype, data = handle.dtype.scalar, handle.data
    if dtype == tl.bfloat16:
        bits = np.ascontiguousarray(data).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(np.shape(data))
    if dtype in FLOAT8:
        codes = torch.from_numpy(np.ascontiguousarray(data)).view(FLOAT8[dtype][0])
        return codes.float().numpy().reshape(np.shape(data))
    return data


def narrow(values: Any, dtype: Any) -> Any:
    """`values` as the interpreter keeps `dtype`; float8 saturates."""
    if not is_narrow(dtype):
        return values.astype(interpreter._get_np_dtype(dtype))
    shape = np.shape(values)
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == tl.bfloat16:
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(shape)
    form, largest = FLOAT8[dtype]
    codes = torch.from_numpy(values).clamp(-largest, largest).to(form)
    return codes.view(torch.uint8).numpy().reshape(shape)


def _dot(_: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
    product = np.matmul(widen(a).astype(np.float32), widen(b).astype(np.float32))
    return Handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _scaled(handle: Any, scale: Any, is_packed: bool) -> Any:
    """Values along rows: e2m1 of bytes, the low half first, times powers of two for every 32."""
    if not is_packed:
        assert scale is None, "only e2m1 has scales here"
        return widen(handle).astype(np.float32)
    codes = np.asarray(handle.data).astype(np.uint8)
    values = E2M1[np.stack((codes & 15, codes >> 4), axis=-1)].reshape(codes.shape[0], -1)
    factors = np.ldexp(np.float32(1), scale.data.astype(np.int32) - 127)
    return values * np.repeat(factors, values.shape[1] // factors.shape[1], axis=1)


def _dot_scaled(_: Any, a: Any, a_scale: Any, a_form: Any, b: Any, b_scale: Any, b_form: Any,
                *rest: Any) -> Any:  # fmt: skip
    """Of e2m1 rows, or 16-bit ones, and a 16-bit right side; exact before the sum."""
    assert b_scale is None and b_form != interpreter._ir.ScaleDotElemTypeTY.E2M1
    left = _scaled(a, a_scale, a_form == interpreter._ir.ScaleDotElemTypeTY.E2M1)
    total = rest[-1]
    product = np.matmul(left, widen(b).astype(np.float32)) + total.data
    return Handle(product.astype(np.float32), total.dtype.scalar)


def _make_cast(before: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, source: Any, target: Any) -> Any:
        wanted = target.scalar
        if is_narrow(source.dtype.scalar) or is_narrow(wanted):
            return Handle(narrow(widen(source), wanted), wanted)
        return before(self, source, target)

    return cast


def _guard(before: Callable[..., Any]) -> Callable[..., Any]:
    def operate(self: Any, *args: Any) -> Any:
        *handles, operation = args
        if not any(is_narrow(handle.dtype.scalar) for handle in handles):
            return before(self, *handles, operation)
        result, dtype = operation(*map(widen, handles)), handles[-1].dtype.scalar  # not a choice's
        if result.dtype == np.bool_:
            return Handle(result, tl.int1)
        return Handle(narrow(result, dtype), dtype)

    return operate


def repair() -> None:
    """Puts the right operations in place, once a process."""
    if getattr(Builder, "is_repaired", False):
        return
    cast = _make_cast(Builder.cast_impl)
    Builder.create_dot = _dot
    Builder.create_dot_scaled = _dot_scaled
    Builder.cast_impl = cast
    Builder.create_fp_to_fp = lambda self, source, target, rounding: cast(self, source, target)
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(Builder, name, _guard(getattr(Builder, name)))
    Builder.is_repaired = True


repair()
