"""How long the exchange of ranks takes where they are on several machines.

Ranks are numbered machine by machine. What an attention group sums within one machine goes over
the machine's links; all else counts as going over the network, its part that stays near included.
"""

import math

from batchmla.engine.exchange import CALL_S, Exchange
from batchmla.engine.hardware import Hardware
from batchmla.placement import Placement

NETWORK_BYTES_PER_S = 50e9  # assumed: a port of 400 Gbit/s for each GPU, one direction
NETWORK_CALL_S = 30e-6  # assumed: launch and synchronisation of one collective between machines
NETWORK_WORDS = (
    f"between machines {NETWORK_BYTES_PER_S / 1e9:.0f} GB/s for each GPU and "
    f"{NETWORK_CALL_S * 1e6:.0f} µs for each exchange are assumed"
)


def exchange_seconds(
    exchange: Exchange, placement: Placement, tokens: float, sampled: float, hardware: Hardware
) -> float:
    """Of one step, in which a rank's group computes so many tokens and samples so many rows; 0 of
    one rank, and of devices whose links are not known."""
    link = hardware.link_bytes_per_s
    if placement.num_ranks == 1 or link is None:
        return 0.0
    if hardware.num_machines == 1:
        return exchange.seconds(placement, tokens, sampled, link)
    near = _near(placement, hardware.count // hardware.num_machines)
    near_s = exchange.seconds(near, tokens, sampled, link)
    far_s = exchange.seconds(placement, tokens, sampled, NETWORK_BYTES_PER_S) - exchange.seconds(
        near, tokens, sampled, NETWORK_BYTES_PER_S
    )
    far_calls_s = exchange.seconds(placement, tokens, sampled, math.inf) - exchange.seconds(
        near, tokens, sampled, math.inf
    )
    return near_s + far_s + far_calls_s * (NETWORK_CALL_S / CALL_S - 1)


def _near(placement: Placement, ranks_near: int) -> Placement:
    """The ranks that only talk within a machine: those of an attention group, if it is on one."""
    is_near = ranks_near % placement.tensor == 0
    return Placement(tensor=placement.tensor) if is_near else Placement()
