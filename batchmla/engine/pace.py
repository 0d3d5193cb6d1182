"""How many prompt tokens a step should compute beside its completions: as many as are free.

A step of completions waits for memory: weights and cache are read for few tokens. Prompt tokens
fill that time with products, up to where the flops of the step take as long as its bytes; more of
them would only wait for their own. Spread like that over the steps, prompts cost nothing as long as
there are fewer of them than time to fill.
"""

from dataclasses import dataclass

from batchmla.engine.costs import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`flops_per_byte`: what the device computes in the time in which it reads a byte."""

    costs: StepCosts
    flops_per_byte: float
    least_tokens: int

    def prompt_tokens(self, decodes: int, context_tokens: int, read_tokens: int) -> int:
        """For a step of `decodes` completions with so many tokens of context in all, of which
        `read_tokens` are read from the cache.
        """
        costs = self.costs
        mean_context = context_tokens / decodes if decodes else 0.0
        # with the tokens added, a step goes to nearly all experts
        read_bytes = costs.weight_bytes(decodes + 2 * self.least_tokens)
        read_bytes += costs.kv_token_bytes * read_tokens
        flops = costs.linear_flops(decodes, decodes) + costs.attention_flops(0, context_tokens)
        token_flops = costs.token_flops + costs.prompt_pair_flops * mean_context
        free = (read_bytes * self.flops_per_byte - flops) / token_flops
        return max(self.least_tokens, int(free))
