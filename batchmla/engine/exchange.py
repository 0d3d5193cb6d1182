"""What the ranks of a model send each other in a step, and how long that takes: from shapes alone.

A rank with T tokens of its group moves, at W bytes a hidden row:
- sums within its group of t ranks, one for the embedding and two a layer, as rings:
  2 (t - 1) / t · T · W each;
- with a groups, where they cut it among them: ids to the embedding and columns back,
  T · (a - 1) · (8 + W / a); rows to a dense layer and back, T · (a - 1) · 2 W; hidden rows of N
  sampled ones to the head and logits back, N · (a - 1) · (W + 4 V / (t · a));
- the logits' shares, gathered: (t - 1) / t · N · V · 4 for N sampled rows;
- in every layer with experts, rows on their way to other groups' experts and back:
  T · (a - 1) · q · (2 W + 8 A), with A experts a token: one row and one sum for every group in
  which it has some, which a given of the e holders of experts has with probability q (see
  `Choice.reached`: 0.66 of 8 experts by chance and 8 holders, 0.45 where a router keeps 4 of 8).
A call costs `CALL_S` besides its bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchmla.engine.routed import Choice, choice_of
from batchmla.kernels.ops import Ops, PackKind
from batchmla.layers.across import piece_rows
from batchmla.layers.block import Block, walk
from batchmla.layers.mlp import GatedMlp
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
    choice: Choice | None
    width: int
    is_tied: bool
    num_dense_layers: int  # that groups may cut among them
    dense_features: int
    dense_unit: int

    def calls(self, placement: Placement, tokens: float) -> int:
        """Collectives of one rank in a step that computes so many tokens in every group."""
        sums = 2 * self.num_layers + 2 if placement.tensor > 1 else 0
        swaps = 3 * self.num_expert_layers if placement.attention_data > 1 else 0
        embeds, denses, heads = self._is_common(placement)
        pieces = max(1, math.ceil(tokens / piece_rows(placement.attention_data)))
        return sums + swaps + 2 * (embeds + heads + denses * self.num_dense_layers * pieces)

    def _is_common(self, placement: Placement) -> tuple[bool, bool, bool]:
        """Whether groups cut embedding, dense layers and head among them."""
        if placement.attention_data == 1:
            return False, False, False
        entries, features = (
            count // placement.tensor for count in (self.vocab_size, self.dense_features)
        )
        return (
            not self.is_tied and placement.common(self.width) > 1,
            placement.common(features, self.dense_unit) > 1,
            not self.is_tied and placement.common(entries) > 1,
        )

    def common_bytes(self, placement: Placement, tokens: float, sampled: float) -> float:
        """Sent by one rank for embedding, dense layers and head that groups cut among them."""
        embeds, denses, heads = self._is_common(placement)
        others, row_bytes = placement.attention_data - 1, self.row_bytes
        embedding = tokens * (8 + row_bytes / placement.attention_data) * embeds
        dense = tokens * 2 * row_bytes * self.num_dense_layers * denses
        logits = sampled * (row_bytes + 4 * self.vocab_size / placement.num_ranks) * heads
        return others * (embedding + dense + logits)

    def sent_bytes(self, placement: Placement, tokens: float, sampled: float) -> float:
        """By one rank, whose group computes so many tokens and samples so many rows."""
        tensor, groups = placement.tensor, placement.attention_data
        others = (tensor - 1) / tensor
        sums = 2 * others * (2 * self.num_layers + 1) * tokens * self.row_bytes
        gathered = others * sampled * self.vocab_size * 4
        swapped = tokens * (groups - 1) * self._swapped_bytes(placement)
        common = self.common_bytes(placement, tokens, sampled)
        return sums + gathered + swapped + common

    def _swapped_bytes(self, placement: Placement) -> float:
        """A token's in all layers, to and from the experts of one other group."""
        if self.choice is None:
            return 0.0
        row_bytes = 2 * self.row_bytes + 8 * self.choice.active
        return self.num_expert_layers * self.choice.reached(placement.expert) * row_bytes

    def seconds(
        self, placement: Placement, tokens: float, sampled: float, link_bytes_per_s: float
    ) -> float:
        """Of one step, nothing of it hidden behind products."""
        sent_s = self.sent_bytes(placement, tokens, sampled) / link_bytes_per_s
        return sent_s + self.calls(placement, tokens) * CALL_S


def exchange_of(raw_config: Mapping[str, Any], ops: Ops, itemsize: int) -> Exchange:
    """Of a parsed `config.json` with hidden rows of `itemsize` bytes a value."""
    family = get_family(raw_config)
    config = family.Config.from_hf(raw_config)
    model = family.build(config, Par(Placement()), ops)
    assert isinstance(model, Block), f"{type(model)} has no weights"
    weights = dict(model.named_weights())
    experts = [each for each in weights.values() if each.kind is PackKind.EXPERTS_UP]
    dense = [
        each for each in walk(model) if isinstance(each, GatedMlp) and each.group_unit is not None
    ]
    width = weights["embed.weight"].shape[-1]
    return Exchange(
        num_layers=config.num_layers,
        num_expert_layers=len(experts),
        row_bytes=width * itemsize,
        vocab_size=config.vocab_size,
        choice=choice_of(model, Placement()),
        width=width,
        is_tied=weights["head.weight"].tied is not None,
        num_dense_layers=len(dense),
        dense_features=dense[0].up.parts[0] if dense else 0,
        dense_unit=dense[0].group_unit or 1 if dense else 1,
    )
