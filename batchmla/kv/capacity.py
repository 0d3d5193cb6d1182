"""How many tokens and sequences a device's memory holds: pure arithmetic, for `plan` and the engine
alike.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from batchmla.kv.layout import KVLayout, Resume

RUNNING_PER_SNAPSHOT = 4  # running sequences for each lane kept of a prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Who gets which share of one device's memory.

    `reserve_bytes` stay untouched (other processes, fragmentation); `workspace_bytes` are the
    activations, logits and gathered rows of the largest step; `driver_bytes` are in use besides
    tensors, for a GPU's context and buffers between devices.
    """

    total_bytes: int
    reserve_bytes: int
    weights_bytes: int
    workspace_bytes: int
    driver_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """What the KV cache may take; negative when the rest alone does not fit."""
        taken_bytes = self.weights_bytes + self.workspace_bytes + self.driver_bytes
        return self.total_bytes - self.reserve_bytes - taken_bytes

    @property
    def kv_bytes(self) -> int:
        return max(0, self.left_bytes)


def pages_within(layout: KVLayout, kv_bytes: int, num_lanes: int) -> int:
    """Pages that `kv_bytes` hold beside the lanes of `num_lanes` sequences."""
    return max(0, kv_bytes - num_lanes * layout.lane_bytes) // layout.page_bytes


def lanes_for(layout: KVLayout, num_running: int) -> int:
    """Lanes of so many running sequences, and of kept prefixes where those start from lanes."""
    if layout.resume is Resume.PAGE:
        return num_running
    return num_running + max(1, num_running // RUNNING_PER_SNAPSHOT)


def pool_bytes(layout: KVLayout, num_pages: int, num_lanes: int) -> int:
    """Bytes of a pool of `num_pages` pages and `num_lanes` lanes."""
    return num_pages * layout.page_bytes + num_lanes * layout.lane_bytes


def kv_capacity_tokens(layout: KVLayout, num_pages: int) -> int:
    """Tokens that fit when every page is full."""
    return num_pages * layout.page_tokens


def max_concurrency(layout: KVLayout, num_pages: int, lengths: Iterable[int]) -> dict[int, float]:
    """For each length, how many sequences of so many tokens the pages hold (18.65 means 18 and a
    part).
    """
    return {length: num_pages / layout.pages_for(length) for length in lengths}
