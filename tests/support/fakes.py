"""Stand-ins for the floors around the engine: a model without weights, a source over a list."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchmla.core import Prompt, SamplingParams
from batchmla.kv.cache import LayerCache
from batchmla.kv.layout import KVLayout, KVPart
from batchmla.kv.step import Step

MODULUS = 1_000_003
FAKE_VOCAB = 97
POWERS = np.array([pow(131, place, MODULUS) for place in range(4096)], np.int64)


def fake_layout(page_tokens: int = 4) -> KVLayout:
    """One layer that keeps a token and its position: exact integers in float32."""
    part = KVPart(name="token", width=2, dtype="float32")
    return KVLayout(layers=((part,),), page_tokens=page_tokens)


def sequence_state(token_ids: npt.ArrayLike, positions: npt.ArrayLike | None = None) -> int:
    """A hash of a whole sequence that depends on every token and on where it stands."""
    tokens = np.asarray(token_ids, np.int64)
    places = np.arange(len(tokens)) if positions is None else np.asarray(positions, np.int64)
    factors = POWERS[np.arange(len(tokens))]
    return int(np.sum((tokens * 7 + places * 3 + 1) * factors % MODULUS) % MODULUS)


def fake_logits(state: int, vocab: int = FAKE_VOCAB) -> np.ndarray:
    """The logits after a sequence with this hash: float32, no ties worth the name."""
    return (
        4 * np.sin((state % 9973 + 1) * np.arange(1, vocab + 1, dtype=np.float64) * 0.731)
    ).astype(np.float32)


def greedy_ids(token_ids: Iterable[int], num_tokens: int, vocab: int = FAKE_VOCAB) -> list[int]:
    """What the fake model generates greedily, computed from the tokens alone."""
    ids = [int(token) for token in token_ids]
    start = len(ids)
    for _ in range(num_tokens):
        ids.append(int(np.argmax(fake_logits(sequence_state(ids), vocab))))
    return ids[start:]


class FakeModel:
    """Reads a sequence's own tokens back out of the paged cache; its logits are a function of those
    alone.

    A page that was lost, shared wrongly, overwritten or not yet written gives wrong tokens.
    `on_step` sees every step before it runs. A sequence that holds `poison` gets NaN logits.
    """

    def __init__(
        self,
        vocab: int = FAKE_VOCAB,
        on_step: Callable[[Step], None] | None = None,
        poison: int | None = None,
        every_row: bool = False,
    ) -> None:
        """`every_row`: hidden states of all rows of a step, not only of each sequence's last."""
        self.vocab = vocab
        self.every_row = every_row
        self.on_step = on_step
        self.poison = poison

    def plan(self, step: Step) -> dict[str, object]:
        """Nothing to plan."""
        return {}

    def forward(self, step: Step, plans: Any, cache: Sequence[LayerCache]) -> torch.Tensor:
        """[T, 1] hashes in float64, of what the cache holds once this step's rows are written."""
        if self.on_step is not None:
            self.on_step(step)
        rows_T2 = torch.stack((step.tokens_T, step.positions_T), dim=1).float()
        token_PB2 = cache[0]["token"]
        token_PB2.view(-1, 2)[step.slots_T] = rows_T2
        held_PB2 = token_PB2.numpy()
        hidden = np.zeros((len(step.tokens_T), 1))
        for s, context in enumerate(step.host_context_S):
            first, last = step.host_starts_S1[s], step.host_starts_S1[s + 1]
            pages = step.pages_SP[s].numpy()[: -(-context // step.page_tokens)]
            rows = held_PB2[pages].reshape(-1, 2)[:context].astype(np.int64)
            is_bad = self.poison is not None and bool((rows[:, 0] == self.poison).any())
            hidden[last - 1] = np.nan if is_bad else sequence_state(rows[:, 0], rows[:, 1])
            for row in range(first, last - 1) if self.every_row else ():
                seen = rows[: context - (last - 1 - row)]
                is_bad = self.poison is not None and bool((seen[:, 0] == self.poison).any())
                hidden[row] = np.nan if is_bad else sequence_state(seen[:, 0], seen[:, 1])
            assert last > first
        return torch.from_numpy(hidden)

    def logits(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        """float32 [N, V]."""
        rows = [
            np.full(self.vocab, np.nan, np.float32)
            if np.isnan(state)
            else fake_logits(int(state), self.vocab)
            for state in hidden_NM[:, 0].tolist()
        ]
        return torch.from_numpy(np.stack(rows))


class ListSource:
    """A `PromptSource` over a list that notes how it was asked."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._left = list(prompts)
        self.asked: list[tuple[int, bool]] = []

    def take(self, limit: int, *, wait: bool) -> Sequence[Prompt]:
        """The next prompts in order."""
        self.asked.append((limit, wait))
        taken, self._left = self._left[:limit], self._left[limit:]
        return taken


def make_prompt(
    index: int, token_ids: Sequence[int], params: SamplingParams | None = None, **fields: Any
) -> Prompt:
    """A prompt with a stream key of its own."""
    return Prompt(
        row_id=str(index),
        index=index,
        params=params or SamplingParams(temperature=0.0, max_tokens=8),
        token_ids=np.asarray(token_ids, np.int32),
        stream_key=fields.pop("stream_key", (index + 1) * 0x9E3779B97F4A7C15 % 2**64),
        **fields,
    )
