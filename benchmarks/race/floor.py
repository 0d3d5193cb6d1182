"""Seconds below which no engine with bfloat16 weights can stay, however it is written."""

from dataclasses import dataclass
from itertools import pairwise

from batchmla.engine.costs import StepCosts
from batchmla.engine.roofline import Rates
from race.workloads import Ids, Rows

MOST_TOGETHER = 64  # rows in a decode step


@dataclass(frozen=True)
class Floor:
    """Prompts by flops, every shared beginning once; then decode steps of up to `MOST_TOGETHER`
    rows by the slower of their flops and their bytes.

    `flops_s` and `bytes_s` are those of everything, of which an engine that could hide the one
    behind the other would take the larger.
    """

    prompt_s: float
    decode_s: float
    flops_s: float
    bytes_s: float

    @property
    def seconds(self) -> float:
        """One after the other."""
        return self.prompt_s + self.decode_s


def floor_of(rows: Rows, costs: StepCosts, rates: Rates) -> Floor:
    """Arithmetic over the rows; pairs are counted in whichever form of attention is cheaper."""
    pair_flops = min(costs.prompt_pair_flops, costs.decode_pair_flops)
    order = sorted(range(len(rows.prompts)), key=rows.prompts.__getitem__)
    shared = [0] + [_common(rows.prompts[a], rows.prompts[b]) for a, b in pairwise(order)] + [0]
    prompt_flops = decode_flops = own_context = shared_context = 0.0
    groups = 0
    for place, index in enumerate(order):
        length, num_new = len(rows.prompts[index]), rows.num_new[index]
        known, kept = shared[place], max(shared[place], shared[place + 1])
        own = length - known
        prompt_flops += costs.linear_flops(own, 1)
        prompt_flops += pair_flops * (own * known + own * own / 2)
        decodes = num_new - 1
        grown = decodes * (decodes + 1) / 2
        decode_flops += costs.linear_flops(decodes, decodes)
        decode_flops += pair_flops * (decodes * length + grown)
        own_context += decodes * (length - kept) + grown
        if kept > known:  # the first row of a group brings what the group shares
            groups += 1
            shared_context += kept - known
    decodes = sum(rows.num_new) - len(rows.num_new)
    steps = max(max(rows.num_new) - 1, decodes / MOST_TOGETHER)
    decode_bytes = costs.kv_token_bytes * own_context
    if steps:
        decode_bytes += steps * costs.weight_bytes(decodes / steps)
    if groups:  # one group's in every step, at the least
        decode_bytes += costs.kv_token_bytes * steps * shared_context / groups
    prompt_s, bytes_s = prompt_flops / rates.flops_per_s, decode_bytes / rates.bytes_per_s
    decode_flops_s = decode_flops / rates.flops_per_s
    return Floor(
        prompt_s=prompt_s,
        decode_s=max(decode_flops_s, bytes_s),
        flops_s=prompt_s + decode_flops_s,
        bytes_s=bytes_s,
    )


def _common(first: Ids, second: Ids) -> int:
    """Leading tokens that both have."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
