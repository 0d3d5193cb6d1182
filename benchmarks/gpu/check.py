"""One check of an op, and the usual form of one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton_case import error

from batchmla.kernels.ops import Ops
from gpu.place import Place

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Check:
    """`run` returns the error, to be at most `bound`; 0 and 0 where bits must agree."""

    name: str
    run: Callable[[Place, Ops, Ops], float]
    bound: float


def tensor(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    """Normal values."""
    return (torch.randn(shape) * scale).to(dtype)


def host(value: Any) -> Any:
    """A tensor on the CPU."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def compared(
    op: Callable[[Ops], Callable[..., Any]], *args: Any, changed: int | None = None
) -> Callable[[Place, Ops, Ops], float]:
    """An op against its specification, which is given float64 where the op takes bfloat16 and
    works in place where `changed` names an argument."""

    def run(place: Place, ours: Ops, spec: Ops) -> float:
        there = [place.put(each) for each in args]
        there = [each.clone() if isinstance(each, torch.Tensor) else each for each in there]
        here = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
        found, wanted = op(ours)(*there), op(spec)(*here)
        if changed is not None:
            found, wanted = there[changed], here[changed]
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        return max(error(host(one).double(), other.double()) for one, other in pairs)

    return run
