"""Finds sequences of a step whose first pages are the same, so that those are attended once.

Sharing is read off the page tables: equal ids hold equal rows. S sequences, P pages.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchmla.kv.step import HostInts, Step

MIN_SAVED_KEYS = 1024  # gathered keys a prefix must save to be worth its own call and the merge
Pages = npt.NDArray[np.int64]  # [S, P]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Sequences, and how many leading tokens all of them share: whole pages, 0 for none.

    The tokens come before every query of the step, so each query sees all of them.
    """

    sequences: HostInts
    num_shared: int


def shared_prefixes(step: Step, sequences: HostInts) -> list[Cluster]:
    """Covers `sequences`: those without company come last, in one cluster that shares nothing."""
    alone = Cluster(sequences, 0)
    if len(sequences) < 2 or step.tokens_T.device.type != "cpu":
        return [alone]
    queries_S = np.diff(step.host_starts_S1)[sequences]
    whole_S = (step.host_context_S[sequences] - queries_S) // step.page_tokens
    most = min(int(whole_S.max()), step.pages_SP.shape[1])
    if most == 0 or len(np.unique(step.pages_SP[:, 0].numpy()[sequences])) == len(sequences):
        return [alone]
    pages_SP = step.pages_SP[:, :most].numpy()[sequences].copy()
    absent = np.arange(most) >= whole_S[:, None]
    pages_SP[absent] = -1 - np.nonzero(absent)[0]  # no two sequences are equal there
    found = _split(pages_SP, np.arange(len(sequences)), 0, step.page_tokens)
    if not found:
        return [alone]
    clusters = [Cluster(sequences[members], num * step.page_tokens) for members, num in found]
    rest = np.setdiff1d(sequences, np.concatenate([cluster.sequences for cluster in clusters]))
    return [*clusters, Cluster(rest, 0)] if len(rest) else clusters


def _split(
    pages_SP: Pages, members: HostInts, depth: int, page_tokens: int
) -> list[tuple[HostInts, int]]:
    """Clusters among `members`, which share `depth` pages, that save the most keys.

    Either all of them share what they have in common, or they part where they differ next.
    """
    if depth == pages_SP.shape[1]:
        parts = [members]
    else:
        order = np.argsort(pages_SP[members, depth], kind="stable")
        ids = pages_SP[members[order], depth]
        parts = np.split(members[order], np.flatnonzero(np.diff(ids)) + 1)
    deeper: list[tuple[HostInts, int]] = []
    for part in parts:
        if len(part) > 1 and depth < pages_SP.shape[1]:
            deeper += _split(pages_SP, part, _common(pages_SP[part], depth + 1), page_tokens)
    together = (np.sort(members), depth)
    saved = _saved_keys(*together, page_tokens)
    if saved >= MIN_SAVED_KEYS and saved > sum(_saved_keys(*one, page_tokens) for one in deeper):
        return [together]
    return deeper


def _saved_keys(members: HostInts, num_pages: int, page_tokens: int) -> int:
    return (len(members) - 1) * num_pages * page_tokens


def _common(pages_SP: Pages, depth: int) -> int:
    """How many leading pages all rows have in common, `depth` of them known."""
    is_same_P = (pages_SP[:, depth:] == pages_SP[0, depth:]).all(axis=0)
    return depth + (len(is_same_P) if is_same_P.all() else int(is_same_P.argmin()))
