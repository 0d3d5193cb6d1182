"""What the ranks of a model send each other in a step, and how long that takes: from shapes alone.

A rank with T tokens of its group moves, at W bytes a hidden row:
- sums within its group of t ranks, one for the embedding and two a layer, as rings:
  2 (t - 1) / t · T · W each;
- the logits' shares, gathered: (t - 1) / t · N · V · 4 for N sampled rows;
- in every layer with experts, rows on their way to other groups' experts and back:
  T · (a - 1) · q · (2 W + 8 A), with a groups and A experts a token, of which at least one is with
  a given of the e holders of experts with probability q = 1 - (1 - 1 / e)^A.
A call costs `CALL_S` besides its bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchmla.kernels.ops import Ops, PackKind
from batchmla.layers.block import Block
from batchmla.models import get_family
from batchmla.parallel import Par
from batchmla.placement import Placement

CALL_S = 10e-6  # assumed: launch and synchronisation of one collective between GPUs of a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A model's part of the formulas."""

    num_layers: int
    num_expert_layers: int
    row_bytes: int
    vocab_size: int
    active_experts: int

    def calls(self, placement: Placement) -> int:
        """Collectives of one rank in a step."""
        sums = 2 * self.num_layers + 2 if placement.tensor > 1 else 0
        swaps = 3 * self.num_expert_layers if placement.attention_data > 1 else 0
        return sums + swaps

    def sent_bytes(self, placement: Placement, tokens: float, sampled: float) -> float:
        """By one rank, whose group computes so many tokens and samples so many rows."""
        tensor, groups = placement.tensor, placement.attention_data
        others = (tensor - 1) / tensor
        sums = 2 * others * (2 * self.num_layers + 1) * tokens * self.row_bytes
        gathered = others * sampled * self.vocab_size * 4
        missed: float = (1 - 1 / placement.expert) ** self.active_experts
        rows = tokens * (groups - 1) * (1 - missed)
        swapped = self.num_expert_layers * rows * (2 * self.row_bytes + 8 * self.active_experts)
        return sums + gathered + swapped

    def seconds(
        self, placement: Placement, tokens: float, sampled: float, link_bytes_per_s: float
    ) -> float:
        """Of one step, nothing of it hidden behind products."""
        sent_s = self.sent_bytes(placement, tokens, sampled) / link_bytes_per_s
        return sent_s + self.calls(placement) * CALL_S


def exchange_of(raw_config: Mapping[str, Any], ops: Ops, itemsize: int) -> Exchange:
    """Of a parsed `config.json` with hidden rows of `itemsize` bytes a value."""
    family = get_family(raw_config)
    config = family.Config.from_hf(raw_config)
    model = family.build(config, Par(Placement()), ops)
    assert isinstance(model, Block), f"{type(model)} has no weights"
    weights = dict(model.named_weights())
    experts = [each for each in weights.values() if each.kind is PackKind.EXPERTS_UP]
    share = experts[0].active_share if experts else 0.0
    return Exchange(
        num_layers=config.num_layers,
        num_expert_layers=len(experts),
        row_bytes=weights["embed.weight"].shape[-1] * itemsize,
        vocab_size=config.vocab_size,
        active_experts=round(share * experts[0].shape[0]) if experts else 0,
    )
