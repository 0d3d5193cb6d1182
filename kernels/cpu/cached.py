"""A paged cache as attention on torch's calls reads it. Shapes: see `batchmla.kernels.ops`."""

from dataclasses import dataclass

import torch

from batchmla.kernels.cpu.records import plain_rows
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.groups import Group
from batchmla.kernels.sparse_ops import Record

BLOCK_VALUES = 2**19  # that are decoded at once


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Pages of rows, or of records that stand for rows; what is gathered lies in `scratch` under
    `use`."""

    pages_PBW: torch.Tensor
    record: Record | None
    scratch: Scratch
    use: str

    @property
    def page_tokens(self) -> int:
        return self.pages_PBW.shape[1]

    def of(self, group: Group, dtype: torch.dtype) -> torch.Tensor:
        """The group's rows [G, L, W] in `dtype`; pages that form a run are not copied."""
        page_tokens, width = self.pages_PBW.shape[1:]
        num_pages, run = group.pages_GP.shape[1], group.page_run
        if run is not None:
            page_values = page_tokens * width
            rows_GLW = self.pages_PBW.as_strided(
                (group.num_sequences, num_pages * page_tokens, width),
                (run.stride * page_values, width, 1),
                self.pages_PBW.storage_offset() + run.first * page_values,
            )
        else:
            shape = (group.num_sequences * num_pages, page_tokens, width)
            pages = self.scratch.take(self.use, shape, self.pages_PBW)
            torch.index_select(self.pages_PBW, 0, group.pages_GP.flatten(), out=pages)
            rows_GLW = pages.view(group.num_sequences, -1, width)
        return self._plain(rows_GLW[:, : group.num_keys], dtype)

    def _plain(self, rows_GLY: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the rows stand for, in blocks: some steps of the way are in float32."""
        record = self.record
        if record is None:
            return rows_GLY.to(dtype)
        num_seqs, num_keys = rows_GLY.shape[:2]
        rows_GLX = rows_GLY.new_empty(num_seqs, num_keys, record.width, dtype=dtype)
        block = max(1, BLOCK_VALUES // (num_seqs * record.width))
        for first in range(0, num_keys, block):
            some = slice(first, first + block)
            rows_GLX[:, some] = plain_rows(rows_GLY[:, some], record, dtype)
        return rows_GLX
