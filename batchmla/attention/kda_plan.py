"""One step of Kimi Delta Attention as tables: what the convolution of each token reads, and what
the lanes keep of it. Pure host arithmetic.

T tokens, S sequences, W taps of the convolution. Places count the rows that the step's sequences
have in their lanes (W - 1 each), then the step's own T rows, then one row of zeros.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchmla.kernels.kda_ops import LaneRows
from batchmla.kv.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaPlan:
    """One step for every layer: a row's place of each tap, and the rows that stay in lanes with
    the flat rows of the lanes that they go to."""

    rows: LaneRows
    lanes_S: torch.Tensor
    places_WT: torch.Tensor
    kept_X: torch.Tensor
    slots_X: torch.Tensor


def plan(step: Step, num_taps: int) -> KdaPlan:
    """Once a step; what lies before a sequence's first token is zeros."""
    assert step.lanes_S is not None, "a step of a model with lanes names none"
    starts_S1, held = step.host_starts_S1, num_taps - 1
    counts_S = np.diff(starts_S1)
    firsts_S = step.host_context_S - counts_S
    sequence_T = np.repeat(np.arange(step.num_sequences), counts_S)
    in_step_T = np.arange(int(starts_S1[-1]))
    positions_T = in_step_T - starts_S1[sequence_T] + firsts_S[sequence_T]
    lanes_S = step.lanes_S.cpu().numpy()

    back_W1 = np.arange(held, -1, -1)[:, None]
    read_WT = positions_T - back_W1
    in_lane_WT = sequence_T * held + read_WT % held
    own_WT = step.num_sequences * held + in_step_T - back_W1
    places_WT = np.where(read_WT >= firsts_S[sequence_T], own_WT, in_lane_WT)
    zeros = step.num_sequences * held + len(positions_T)
    places_WT = np.where(read_WT < 0, zeros, places_WT)

    kept_X = np.flatnonzero(positions_T >= step.host_context_S[sequence_T] - held)
    slots_X = lanes_S[sequence_T[kept_X]] * held + positions_T[kept_X] % held

    def put(values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(step.tokens_T.device)

    return KdaPlan(
        rows=LaneRows(starts_S1=starts_S1, lanes_S=lanes_S, is_first_S=firsts_S == 0),
        lanes_S=step.lanes_S,
        places_WT=put(places_WT),
        kept_X=put(kept_X),
        slots_X=put(slots_X),
    )
