"""How evenly a run's tokens fell on experts and on the ranks that hold them. Host only."""

from collections.abc import Sequence

import numpy as np

from batchmla.core import ExpertLoad


def expert_load(counts: Sequence[Sequence[int]], num_holders: int) -> ExpertLoad | None:
    """From how often each expert of each layer was chosen; None before any token was.

    Holders have consecutive experts, the same number each.
    """
    counts_LE = np.array(counts, np.int64)
    if not counts_LE.size or not counts_LE.sum():
        return None
    counts_LE = counts_LE[counts_LE.sum(axis=1) > 0]
    holders_LH = counts_LE.reshape(len(counts_LE), num_holders, -1).sum(axis=2)
    return ExpertLoad(
        holder_tokens=tuple(holders_LH.sum(axis=0).tolist()),
        busiest_holder=float(np.mean(holders_LH.max(axis=1) / holders_LH.mean(axis=1))),
        busiest_expert=float(np.max(counts_LE.max(axis=1) / counts_LE.mean(axis=1))),
    )
