"""Tensor operations behind one table of callables; knows no model, module, config or rank."""

if __name__ != "batchmla.kernels":
    raise ImportError("import batchmla.kernels; run pip install -e . once")

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchmla.kernels.ops import Ops

BACKENDS = ("reference", "cpu", "torch", "triton")


def load(backend: str, *, exact: bool = False) -> "Ops":
    """The ops of one back end; "reference" is the specification, "cpu" and "triton" the paths that
    run.

    "cpu" is compiled C where the machine allows it, else, as "torch" always, calls of torch;
    "triton" has kernels for GPUs, and has no exact form: cuBLAS sums in an order that follows the
    number of rows.

    With `exact` a row's results depend on that row alone, not on what shares a call with it.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown kernel back end {backend!r}; known are {', '.join(BACKENDS)}")
    if exact:
        if backend in ("reference", "triton"):
            raise ValueError(f"kernel back end {backend!r} has no exact form; cpu has one")
        exact_ops: Ops = import_module("batchmla.kernels.cpu.exact").make_exact(backend)
        return exact_ops
    if backend == "reference":
        reference: Ops = import_module("batchmla.kernels.reference.table").make_ops()
        return reference
    if backend == "triton":
        gpu_ops: Ops = import_module("batchmla.kernels.triton.table").make_ops()
        return gpu_ops
    return _torch_ops(backend)


def load_counting(backend: str, *, exact: bool = False) -> "Ops":
    """Ops of which only the sizes of packed weights are asked: those of kernels for GPUs can be
    planned for where there is no Triton."""
    if backend != "triton" or exact:
        return load(backend, exact=exact)
    packing = import_module("batchmla.kernels.triton.linear")
    return replace(
        _torch_ops("torch"), name=backend, pack=packing.pack, packed_bytes=packing.packed_bytes
    )


def _torch_ops(backend: str) -> "Ops":
    ops: Ops = import_module("batchmla.kernels.cpu.table").make_ops(backend)
    return ops
