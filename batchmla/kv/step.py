"""The token and page tables of one forward pass, as models and attention flavours read them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchmla.kernels.groups import Kept

HostInts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass over T tokens of S sequences; s owns the rows starts[s]:starts[s+1].

    Its tokens stand at the positions context[s] - (starts[s+1] - starts[s]) … context[s] - 1 of the
    sequence; `context` counts the tokens in the cache once this step's rows are written. Page
    tables are padded with 0. `host_*` are numbers on the host, for planning without a round trip.
    """

    tokens_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    slots_T: (
        torch.Tensor
    )  # int64: page id * page_tokens + offset, the row of a stride-1 part seen flat
    pages_SP: torch.Tensor  # int64
    logits_rows_N: torch.Tensor  # int64: rows of T whose logits are wanted
    page_tokens: int
    host_starts_S1: HostInts
    host_context_S: HostInts
    host_prompt_S: HostInts  # prompt length of each sequence; positions beyond it were generated
    lanes_S: torch.Tensor | None = None  # int64: where a sequence's windows and states are kept
    is_exact: bool = False  # attention is planned by position alone, not by what is cheapest
    host_pages_SP: HostInts | None = None
    kept: Kept | None = None  # what kernels keep of the step, where that outlives it

    @property
    def num_sequences(self) -> int:
        return len(self.host_context_S)

    @property
    def page_ids_SP(self) -> HostInts:
        """`pages_SP` on the host; without `host_pages_SP` it is fetched."""
        return self.pages_SP.cpu().numpy() if self.host_pages_SP is None else self.host_pages_SP
