"""Triton's interpreter with right arithmetic of bfloat16 and float8; import before any launch.

The interpreter keeps bfloat16 as 16-bit integers and works on those, and rounds to float8 wrongly.
Here values are widened to float32 before every operation and rounded to nearest even after it.
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
    return dtype == tl.bfloat16 or dtype in FLOAT8


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
        result, dtype = operation(*map(widen, handles)), handles[0].dtype.scalar
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
    Builder.cast_impl = cast
    Builder.create_fp_to_fp = lambda self, source, target, rounding: cast(self, source, target)
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(Builder, name, _guard(getattr(Builder, name)))
    Builder.is_repaired = True


repair()
