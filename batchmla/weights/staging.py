"""Slices of a checkpoint on their way to a device: through two page-locked buffers in turn.

While one is copied to the device the other is filled from the file, so loading takes the longer of
both, and no more memory of the host than the buffers, however large a weight is.
"""

from collections.abc import Callable
from typing import Protocol

import torch

BUFFER_BYTES = 32 << 20


class Arrival(Protocol):
    """Tells that what was copied before it is there."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Staging:
    """Copies slices to one device. On the host it only copies; with CUDA it has not yet run."""

    def __init__(
        self,
        device: torch.device,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        make_arrival: Callable[[], Arrival] | None = None,
    ) -> None:
        """`make_arrival`: of events of the device; None: CUDA's, or none on the host."""
        self._buffers: list[torch.Tensor] = []
        self._arrivals: list[Arrival | None] = [None, None]
        self._turn = 0
        is_cuda = device.type == "cuda"
        if make_arrival is None and is_cuda:
            make_arrival = torch.cuda.Event
        self._make_arrival = make_arrival
        if make_arrival is not None:
            self._buffers = [
                torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)
            ]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`source`, on the host, into `target` of the same shape, whose dtype it takes."""
        assert target.shape == source.shape, f"{target.shape} is filled with {source.shape}"
        if self._make_arrival is None or not source.numel() or not source.dim():
            target.copy_(source)
            return
        count = len(self._buffers[0]) // (source[0].numel() * source.element_size())
        if not count:  # a row is larger than a buffer
            for row in range(len(source)):
                self.copy(target[row], source[row])
            return
        for start in range(0, len(source), count):
            self._send(target[start : start + count], source[start : start + count])

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        arrival = self._arrivals[self._turn]
        if arrival is not None:
            arrival.synchronize()
        assert self._make_arrival is not None
        num_bytes = source.numel() * source.element_size()
        buffer = self._buffers[self._turn][:num_bytes].view(source.dtype).view(source.shape)
        buffer.copy_(source)
        target.copy_(buffer, non_blocking=True)
        arrival = self._make_arrival()
        arrival.record()
        self._arrivals[self._turn] = arrival
        self._turn = 1 - self._turn
