"""Turns the schedule into the tables of one forward pass, and those into its tensors.

T tokens, S sequences, P pages of the longest page table, N rows whose logits are wanted.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchmla.engine.group import Chunk
from batchmla.engine.stream import put
from batchmla.kv.step import HostInts, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTables:
    """A `Step` on the host: what every rank needs to know of a schedule."""

    tokens_T: HostInts
    positions_T: HostInts
    slots_T: HostInts
    pages_SP: HostInts
    logits_rows_N: HostInts
    starts_S1: HostInts
    context_S: HostInts
    prompt_S: HostInts
    lanes_S: HostInts

    def on(self, device: torch.device, page_tokens: int, *, is_exact: bool = False) -> Step:
        """The tensors."""

        return Step(
            tokens_T=put(self.tokens_T, device),
            positions_T=put(self.positions_T, device),
            slots_T=put(self.slots_T, device),
            pages_SP=put(self.pages_SP, device),
            logits_rows_N=put(self.logits_rows_N, device),
            page_tokens=page_tokens,
            host_starts_S1=self.starts_S1,
            host_context_S=self.context_S,
            host_prompt_S=self.prompt_S,
            lanes_S=put(self.lanes_S, device),
            is_exact=is_exact,
            host_pages_SP=self.pages_SP,
        )


def step_tables(chunks: Items[Chunk], page_tokens: int) -> StepTables:
    """The tokens, positions, slots and page tables of `chunks`, in their order."""
    counts_S = np.array([chunk.num_tokens for chunk in chunks], np.int64)
    firsts_S = np.array([chunk.start for chunk in chunks], np.int64)
    starts_S1 = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts_S)))
    context_S = firsts_S + counts_S
    samples_S = np.array([chunk.samples for chunk in chunks], bool)

    sequence_T = np.repeat(np.arange(len(chunks)), counts_S)
    offset_T = np.arange(starts_S1[-1]) - starts_S1[sequence_T]
    positions_T = firsts_S[sequence_T] + offset_T
    tokens_T = np.concatenate(
        [
            chunk.sequence.tokens.view[chunk.start : chunk.start + chunk.num_tokens]
            for chunk in chunks
        ]
    ).astype(np.int64)
    pages_SP = _page_tables(chunks, -(-context_S // page_tokens))
    page_T = pages_SP[sequence_T, positions_T // page_tokens]
    return StepTables(
        tokens_T=tokens_T,
        positions_T=positions_T,
        slots_T=page_T * page_tokens + positions_T % page_tokens,
        pages_SP=pages_SP,
        logits_rows_N=starts_S1[1:][samples_S] - 1,
        starts_S1=starts_S1,
        context_S=context_S,
        prompt_S=np.array([chunk.sequence.prompt_tokens for chunk in chunks], np.int64),
        lanes_S=np.array([chunk.sequence.lane for chunk in chunks], np.int64),
    )


def _page_tables(chunks: Items[Chunk], num_pages_S: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[S, P]: the pages that hold each sequence's context after this step, padded with 0."""
    pages_SP = np.zeros((len(chunks), int(num_pages_S.max())), np.int64)
    for row_P, chunk, num_pages in zip(pages_SP, chunks, num_pages_S, strict=True):
        pages = chunk.sequence.pages.view
        assert len(pages) >= num_pages, (
            f"{len(pages)} pages for {chunk.start + chunk.num_tokens} tokens"
        )
        row_P[:num_pages] = pages[:num_pages]
    return pages_SP
