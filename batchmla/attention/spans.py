"""A step's sequences for back ends that read pages by themselves; pure host arithmetic.

S sequences of the step, G of a call, P pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from batchmla.attention.groups import MAX_CHUNK_KEYS
from batchmla.attention.prefixes import shared_prefixes
from batchmla.kernels.groups import Groups, Kept, Shared, Spans
from batchmla.kv.step import HostInts, Step


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows first_row … of T that hold consecutive positions of a sequence, up to key num_keys."""

    sequence_G: HostInts
    first_row_G: HostInts
    num_queries_G: HostInts
    num_keys_G: HostInts

    def take(self, chosen_G: npt.NDArray[np.bool_] | HostInts) -> "Runs":
        """Some of them."""
        return Runs(
            self.sequence_G[chosen_G],
            self.first_row_G[chosen_G],
            self.num_queries_G[chosen_G],
            self.num_keys_G[chosen_G],
        )


def whole_runs(step: Step) -> Runs:
    """One for each sequence."""
    return Runs(
        np.arange(step.num_sequences),
        step.host_starts_S1[:-1],
        np.diff(step.host_starts_S1),
        step.host_context_S,
    )


def prompt_and_generated(step: Step) -> tuple[Runs, Runs]:
    """The rows at positions of the prompt, and those after it."""
    runs = whole_runs(step)
    start_S = runs.num_keys_G - runs.num_queries_G
    border_S = np.clip(step.host_prompt_S, start_S, runs.num_keys_G)
    prompt_S = border_S - start_S
    prompts = Runs(runs.sequence_G, runs.first_row_G, prompt_S, border_S)
    generated = Runs(
        runs.sequence_G,
        runs.first_row_G + prompt_S,
        runs.num_queries_G - prompt_S,
        runs.num_keys_G,
    )
    return prompts.take(prompt_S > 0), generated.take(generated.num_queries_G > 0)


def read_in_place(step: Step, runs: Runs) -> Groups:
    """Keys as they lie in the cache; what generated tokens share is named."""
    if not len(runs.sequence_G):
        return Groups(members=())
    pages_SP = np.ascontiguousarray(step.page_ids_SP)
    spans = _spans(step, runs, runs.sequence_G, pages_SP, None)
    return Groups(members=(), spans=(replace(spans, shared=_shared(step, runs)),))


def _shared(step: Step, runs: Runs) -> tuple[Shared, ...]:
    """Of the runs of one query."""
    single_N = np.flatnonzero(runs.num_queries_G == 1)
    place_S = np.zeros(step.num_sequences, np.int64)
    place_S[runs.sequence_G[single_N]] = single_N
    clusters = shared_prefixes(step, runs.sequence_G[single_N])
    return tuple(
        Shared(place_S[cluster.sequences], cluster.num_shared)
        for cluster in clusters
        if cluster.num_shared
    )


def expanded_first(step: Step, runs: Runs) -> Groups:
    """Keys that are expanded page by page, of few sequences at a time; shared pages go together."""
    pages_SP = step.page_ids_SP
    order_G = np.argsort(pages_SP[runs.sequence_G, 0], kind="stable")
    runs = runs.take(order_G)
    spans = []
    for batch in _batches(step, runs, pages_SP):
        table_GP = np.zeros((len(batch.sequence_G), pages_SP.shape[1]), np.int64)
        used_GP = _used(step, batch, pages_SP.shape[1])
        pages_U, places = np.unique(pages_SP[batch.sequence_G][used_GP], return_inverse=True)
        table_GP[used_GP] = places
        rows_G = np.arange(len(batch.sequence_G))
        spans.append(_spans(step, batch, rows_G, table_GP, torch.from_numpy(pages_U)))
    return Groups(members=(), spans=tuple(spans))


def _spans(
    step: Step,
    runs: Runs,
    table_row_G: HostInts,
    pages_GP: HostInts,
    pages_U: torch.Tensor | None,
) -> Spans:
    return Spans(
        first_row_G=np.ascontiguousarray(runs.first_row_G),
        num_queries_G=np.ascontiguousarray(runs.num_queries_G),
        num_keys_G=np.ascontiguousarray(runs.num_keys_G),
        table_row_G=np.ascontiguousarray(table_row_G),
        pages_GP=pages_GP,
        page_tokens=step.page_tokens,
        pages_U=pages_U,
        kept=step.kept or Kept(),
    )


def _used(step: Step, runs: Runs, num_pages: int) -> npt.NDArray[np.bool_]:
    """[G, P]: which pages of the tables hold keys that are seen."""
    pages_G = -(-runs.num_keys_G // step.page_tokens)
    used_GP: npt.NDArray[np.bool_] = np.arange(num_pages) < pages_G[:, None]
    return used_GP


def _batches(step: Step, runs: Runs, pages_SP: HostInts) -> Iterator[Runs]:
    """Cuts where another MAX_CHUNK_KEYS keys have come that no run before has."""
    if not len(runs.sequence_G):
        return
    used_GP = _used(step, runs, pages_SP.shape[1])
    _, at = np.unique(pages_SP[runs.sequence_G][used_GP], return_index=True)
    owner = np.repeat(np.arange(len(runs.sequence_G)), used_GP.sum(axis=1))[at]
    fresh_G = np.bincount(owner, minlength=len(runs.sequence_G)) * step.page_tokens
    batch_G = (np.cumsum(fresh_G) - 1) // MAX_CHUNK_KEYS
    for index in np.unique(batch_G):
        yield runs.take(batch_G == index)
