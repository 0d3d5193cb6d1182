"""The logits that an engine samples from, as they go by."""

from collections.abc import Sequence as Items

import torch

from batchmla.engine.engine import EngineCore
from batchmla.engine.sampler import Draw
from batchmla.engine.sequence import Sequence


def watch_logits(engine: EngineCore) -> dict[tuple[int, int], torch.Tensor]:
    """Every row of logits that is sampled, by prompt index and number of tokens before it."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    sampler = engine._runner._sampler
    plain_draw = sampler.draw

    def draw(logits_NV: torch.Tensor, sequences: Items[Sequence]) -> list[Draw]:
        for row, sequence in enumerate(sequences):
            seen[sequence.prompt.index, sequence.num_tokens] = logits_NV[row].clone()
        return plain_draw(logits_NV, sequences)

    sampler.draw = draw  # type: ignore[method-assign]
    return seen
