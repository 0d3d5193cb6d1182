"""Memory of a GPU that is in use besides tensors: the driver's context, and what NCCL keeps of it
to talk to the others. An estimate, pure arithmetic.

NCCL connects the ranks of a group when they first talk, channel by channel and in both directions.
A connection holds buffers of all three protocols (LL: 8 lines of 512 threads, LL128: 120 words of
640 threads, of 16 and 8 bytes and 8 steps each; Simple: 4 MiB) where data arrives, and a head where
it leaves, both in units of 2 MiB: 10 + 2 MiB. An exchange connects a rank with every other one, a
sum with its two neighbours in a ring, and, where a switch adds up for more than two ranks, it takes
two more buffers of 8 steps of 128 KiB a channel and rank.

Source: NCCL's `computeBuffSizes`, `p2pRecvSetup` and `ncclNvlsBufferSetup`. Of 8 H100 that exchange
in 32 channels 4.34 GB are reported beside torch's own memory, of which connections by this are
32 · 7 · 12 MiB (https://github.com/NVIDIA/nccl/issues/1685, which lists buffers of both sizes); the
rest is `CONTEXT_BYTES` and `TALKING_BYTES`. Not measured here.
"""

from batchmla.parallel import MAX_CHANNELS
from batchmla.placement import Placement

CONTEXT_BYTES = 512 << 20  # assumed: a process's context; 0.4 to 0.5 GiB are reported
TALKING_BYTES = 985_000_000  # NCCL's kernels and communicators, by the report above

STEPS = 8
PROTOCOL_BYTES = (8 * 512 * STEPS * 16, 120 * 640 * STEPS * 8, 4 << 20)
UNIT_BYTES = 2 << 20  # of memory that ranks share
SWITCH_STEP_BYTES = 128 << 10
SWITCH_CHANNELS = 16  # at most


def connection_bytes() -> int:
    """Of one channel to and from another rank."""
    units = -(-sum(PROTOCOL_BYTES) // UNIT_BYTES)
    return (units + 1) * UNIT_BYTES


def driver_bytes(placement: Placement, num_channels: int = MAX_CHANNELS) -> int:
    """What one GPU of so many ranks has in use besides tensors; ranks on other machines count as if
    they were near."""
    if placement.num_ranks == 1:
        return CONTEXT_BYTES
    tensor, groups = placement.tensor, placement.attention_data
    peers = groups - 1 + min(2, tensor - 1)
    buffers = num_channels * peers * connection_bytes()
    return CONTEXT_BYTES + TALKING_BYTES + buffers + _switch_bytes(tensor, num_channels)


def _switch_bytes(tensor: int, num_channels: int) -> int:
    """Of sums in the switch between the GPUs of a group."""
    if tensor <= 2:
        return 0
    return min(num_channels, SWITCH_CHANNELS) * 2 * STEPS * SWITCH_STEP_BYTES * tensor
