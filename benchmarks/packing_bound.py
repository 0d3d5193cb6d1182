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
    """Seconds for linears and for attention, of computing and of reading, and the greatest share of
    prompt tokens that a cache can serve.
    """

    linear_s: float
    weights_s: float
    attention_s: float
    kv_s: float
    best_hit_share: float

    @property
    def compute_s(self) -> float:
        return self.linear_s + self.attention_s

    @property
    def memory_s(self) -> float:
        return self.weights_s + self.kv_s

    @property
    def seconds(self) -> float:
        """The larger of both."""
        return max(self.compute_s, self.memory_s)

    def within(self, overlap: str) -> float:
        """Seconds where computing and reading overlap in a whole step ("all"), within linears and
        within attention ("some"), or never ("none").
        """
        if overlap == "all":
            return self.seconds
        if overlap == "none":
            return self.compute_s + self.memory_s
        return max(self.linear_s, self.weights_s) + max(self.attention_s, self.kv_s)


def bound_of(trace: Trace, machine: Machine) -> Bound:
    """Arithmetic over the rows; nothing is simulated."""
    costs, size = machine.costs, machine.page_tokens
    seen: set[PageHash] = set()
    linear_flops = attention_flops = prompt_tokens = hit_tokens = 0.0
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
        linear_flops += costs.linear_flops(own + decodes, 1 + decodes)
        attention_flops += costs.attention_flops(own * known + own * (own + 1) / 2, pairs)
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
    weight_bytes = steps * costs.fixed_bytes + generated / machine.max_num_seqs * expert_bytes
    return Bound(
        linear_s=linear_flops / machine.rates.flops_per_s,
        weights_s=weight_bytes / machine.rates.bytes_per_s,
        attention_s=attention_flops / machine.rates.flops_per_s,
        kv_s=kv_tokens * costs.kv_token_bytes / machine.rates.bytes_per_s,
        best_hit_share=hit_tokens / prompt_tokens,
    )
