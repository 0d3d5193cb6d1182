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
    found = _split(pages_SP, step.page_tokens)
    if not found:
        return [alone]
    clusters = [Cluster(sequences[members], num * step.page_tokens) for members, num in found]
    rest = np.setdiff1d(sequences, np.concatenate([cluster.sequences for cluster in clusters]))
    return [*clusters, Cluster(rest, 0)] if len(rest) else clusters


@dataclass(slots=True)
class _Branch:
    """Sequences from place `first` of the order on, which share `depth` pages; and what was found
    among them so far, with the keys that it saves."""

    depth: int
    first: int
    found: list[tuple[HostInts, int]]
    saved_keys: int = 0

    def take(self, found: list[tuple[HostInts, int]], saved_keys: int) -> None:
        """What was found in a branch of this one."""
        self.found += found
        self.saved_keys += saved_keys


def _split(pages_SP: Pages, page_tokens: int) -> list[tuple[HostInts, int]]:
    """Clusters that save the most keys, each with how many pages it shares.

    Side by side in the order of their pages, sequences branch where neighbours differ. A branch
    ends where neighbours share less; then either all of it share what they have in common, or what
    was found in its own branches stays. One pass, however deep they lie.
    """
    order = _in_order(pages_SP)
    open_branches = [_Branch(0, 0, [])]
    for end, depth in enumerate([*_common(pages_SP[order]), 0], start=1):
        first, found, saved_keys = end - 1, list[tuple[HostInts, int]](), 0
        while open_branches[-1].depth > depth:
            branch = open_branches.pop()
            branch.take(found, saved_keys)
            first, found, saved_keys = branch.first, branch.found, branch.saved_keys
            together = (end - first - 1) * branch.depth * page_tokens
            if together >= MIN_SAVED_KEYS and together > saved_keys:
                found, saved_keys = [(np.sort(order[first:end]), branch.depth)], together
        if open_branches[-1].depth < depth:
            open_branches.append(_Branch(depth, first, found, saved_keys))
        else:
            open_branches[-1].take(found, saved_keys)
    return open_branches[0].found


def _in_order(pages_SP: Pages) -> HostInts:
    """The sequences in the order of their first page, then of their second, …"""
    rows_SP = np.ascontiguousarray(pages_SP.astype(">i8"))
    order_S: HostInts = np.argsort(rows_SP.view(f"V{rows_SP.shape[1] * 8}")[:, 0], kind="stable")
    return order_S


def _common(pages_SP: Pages) -> list[int]:
    """How many leading pages each row has in common with the next."""
    differs_SP = pages_SP[1:] != pages_SP[:-1]
    depth_S = np.where(differs_SP.any(axis=1), differs_SP.argmax(axis=1), pages_SP.shape[1])
    found: list[int] = depth_S.tolist()
    return found
