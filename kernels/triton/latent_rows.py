"""A paged cache of latents as kernels address it: flat rows of values or codes, tails, factors."""

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from batchmla.kernels.ops import MlaDims
from batchmla.kernels.sparse_ops import Record

TILE = 128  # codes that share a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRows:
    """A cache as flat rows [P*B, ...]: latents (values or codes), tails, and factors of codes."""

    latent: torch.Tensor
    tail: torch.Tensor
    factors: torch.Tensor | None
    page_tokens: int

    @classmethod
    def of(
        cls, cache_PBW: torch.Tensor, dims: MlaDims, record: Record | None, codes: torch.dtype
    ) -> "LatentRows":
        """Views; `codes` is the type by which the device reads e4m3."""
        flat, page_tokens = cache_PBW.flatten(0, 1), cache_PBW.shape[1]
        if record is None:
            latent, tail = flat[:, : dims.latent], flat[:, dims.latent :]
            return cls(latent=latent, tail=tail, factors=None, page_tokens=page_tokens)
        assert record.tile == TILE and not record.has_e8m0 and not record.scales_last, record
        start, stop = record.values, record.values + record.scale_bytes
        if start % 4 or record.num_bytes % 4:
            raise ValueError(
                f"a latent of {start} values in a record of {record.num_bytes} bytes cannot be "
                "read: both must be multiples of 4; use a cache of another dtype"
            )
        return cls(
            latent=flat[:, :start].view(codes),
            tail=flat[:, stop:].view(torch.bfloat16),
            factors=flat[:, start:stop].view(torch.float32),
            page_tokens=page_tokens,
        )

    def boxes(self, keys: int) -> tuple[TensorDescriptor, TensorDescriptor] | None:
        """Descriptors of tiles of so many rows, where pages hold whole tiles and widths are powers
        of two."""
        widths = self.latent.shape[1], self.tail.shape[1]
        is_even = all(width == triton.next_power_of_2(width) and width >= 16 for width in widths)
        aligned = all(
            part.data_ptr() % 16 == 0 and part.stride(0) * part.element_size() % 16 == 0
            for part in (self.latent, self.tail)
        )
        if not (is_even and aligned) or self.page_tokens % keys:
            return None
        return (
            TensorDescriptor.from_tensor(self.latent, [keys, widths[0]]),
            TensorDescriptor.from_tensor(self.tail, [keys, widths[1]]),
        )
