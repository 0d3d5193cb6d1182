"""What no order of a job can beat on a machine: the larger of its total compute and total memory.

Every distinct page of a prompt is computed once, and every completion token once. Each decode step
reads the weights besides routed experts; there are at least as many as the pool allows, in which a
row holds its own pages from its first token to its last, and shared pages take no room, and as many
as the longest row takes. Of the experts a token reads no less than its part in the largest batch.
"""

from dataclasses import dataclass

from packing_machines import Machine
from packing_trace import Trace

from batchmla.kv.pages import PageHash, chain_hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds, and the greatest share of prompt tokens that a cache can serve."""

    compute_s: float
    memory_s: float
    best_hit_share: float

    @property
    def seconds(self) -> float:
        """The larger of both."""
        return max(self.compute_s, self.memory_s)


def bound_of(trace: Trace, machine: Machine) -> Bound:
    """Arithmetic over the rows; nothing is simulated."""
    costs, size = machine.costs, machine.page_tokens
    seen: set[PageHash] = set()
    compute_flops = prompt_tokens = hit_tokens = 0.0
    kv_tokens = held_tokens = generated = 0
    for prompt, count in zip(trace.prompts, trace.output_tokens, strict=True):
        length = len(prompt.token_ids)
        hashes: list[PageHash] = []
        chain_hashes(hashes, prompt.token_ids, size, length - 1)
        known = sum(name in seen for name in hashes) * size
        seen.update(hashes)
        own = length - known
        decodes = count - 1 if trace.is_known else count  # the last one only draws the end
        pairs = decodes * length + decodes * (decodes + 1) // 2
        compute_flops += costs.linear_flops(own + decodes, 1 + decodes)
        compute_flops += costs.attention_flops(own * known + own * (own + 1) / 2, pairs)
        kv_tokens += pairs - (known * decodes if machine.reads_once else 0)
        held_tokens += decodes * own + decodes * (decodes + 1) // 2
        generated += decodes
        prompt_tokens += length
        hit_tokens += known
    steps = max(
        held_tokens / machine.pool_tokens,
        generated / machine.max_num_seqs,
        (prompt_tokens - hit_tokens + generated) / machine.max_batched_tokens,
    )
    steps = max(steps, max(trace.output_tokens) - trace.is_known)
    expert_bytes = costs.weight_bytes(machine.max_num_seqs) - costs.fixed_bytes
    read_bytes = steps * costs.fixed_bytes + generated / machine.max_num_seqs * expert_bytes
    read_bytes += kv_tokens * costs.kv_token_bytes
    return Bound(
        compute_s=compute_flops / machine.rates.flops_per_s,
        memory_s=read_bytes / machine.rates.bytes_per_s,
        best_hit_share=hit_tokens / prompt_tokens,
    )
