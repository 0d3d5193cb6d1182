"""Numbers on their way to a device and back, without waiting for what it computes meanwhile."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt
import torch


def put(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The values there. A GPU copies them when it comes to it; on the host they are shared."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Reader(Protocol):
    """Brings results to the host."""

    def start(self, values: torch.Tensor) -> Callable[[], list[Any]]:
        """Begins to copy `values` once they are computed; calling the result waits for them."""
        ...


class CudaReader:
    """By way of page-locked memory and an event. Has not yet run on a GPU."""

    def start(self, values: torch.Tensor) -> Callable[[], list[Any]]:
        """See `Reader`."""
        landed = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        landed.copy_(values, non_blocking=True)
        is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_there.record()

        def wait() -> list[Any]:
            is_there.synchronize()
            found: list[Any] = landed.tolist()
            return found

        return wait
