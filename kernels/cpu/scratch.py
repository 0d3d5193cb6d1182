"""Memory that one back end uses again and again, so that large copies do not fault in new pages."""

import math

import torch


class Scratch:
    """Flat buffers by use; each grows to the largest request and is overwritten by the next."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of `shape` with the dtype and device of `like`; valid until the
        next request for the same use."""
        key, count = (use, like.dtype, like.device), math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < count:
            buffer = torch.empty(count + count // 4, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:count].view(shape)
