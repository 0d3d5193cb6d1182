"""How many prompt tokens a step should compute beside its completions: as many as are free.

Products of a step of completions wait for memory, as weights are read for few tokens. Prompt tokens
fill that time, up to where the flops of the step take as long as its bytes; more of them would only
wait for their own. Spread like that over the steps, prompts cost nothing as long as there are fewer
of them than time to fill. Where there are more, steps would become many and small, so that the
limit is raised until nearly all places are taken.
"""

from dataclasses import dataclass

from batchmla.engine.costs import StepCosts

RAISE = 1.0005  # a step that the limit held back while places were free
LOWER = 1.02  # a step that it did not
MOST = 16.0


@dataclass(slots=True, kw_only=True)
class Pace:
    """What a device allows: `costs` are those of all devices together, which share the work of so
    many `groups`; `flops_per_byte` is what they compute in the time in which they read a byte.

    `overlaps_attention`: a device that reads for attention while it multiplies weights. Else only
    within the products, one after the other, there is time to fill. `scale`: of the limit, at
    present.
    """

    costs: StepCosts
    flops_per_byte: float
    least_tokens: int
    groups: int = 1
    overlaps_attention: bool = False
    scale: float = 1.0

    def prompt_tokens(self, decodes: int, context_tokens: int) -> int:
        """For a group's step of `decodes` completions, which read so much context in all."""
        return max(self.least_tokens, int(self.scale * self._free(decodes, context_tokens)))

    def note(self, *, was_short: bool) -> None:
        """Whether the last step had prompts and places left, but no tokens for them."""
        self.scale = self.scale * RAISE if was_short else self.scale / LOWER
        self.scale = min(max(self.scale, 1.0), MOST)

    def _free(self, decodes: int, context_tokens: int) -> float:
        costs = self.costs
        # with the tokens added, a step goes to nearly all experts
        read_bytes = costs.weight_bytes(self.groups * (decodes + 2 * self.least_tokens))
        read_bytes /= self.groups
        flops = costs.linear_flops(decodes, decodes)
        if self.overlaps_attention:
            read_bytes += costs.kv_token_bytes * context_tokens
            flops += costs.attention_flops(0, context_tokens)
        return (read_bytes * self.flops_per_byte - flops) / costs.token_flops
