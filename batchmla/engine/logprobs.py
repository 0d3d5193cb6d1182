"""Log-probabilities of tokens: the model's own, from its logits before anything is done to them.

A row's numbers depend on its own logits only, whatever it is computed together with. R rows, V
vocabulary, K most likely ids.
"""

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from batchmla.core import Logprobs
from batchmla.kernels.cpu.sample import BLOCK, largest_few

LARGEST = torch.finfo(torch.float32).max
Entry = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]  # ids and values of a position
NO_ENTRY: Entry = (np.empty(0, np.int32), np.empty(0, np.float32))


def score(logits_RV: torch.Tensor, ids: Items[int], num_likely: Items[int]) -> list[Entry]:
    """For every row its own id first, then the most likely ones, as many as that row wants."""
    most = min(max(num_likely), logits_RV.shape[1])
    ids_R1 = torch.tensor(ids, dtype=torch.int64, device=logits_RV.device)[:, None]
    best_R1 = logits_RV.max(dim=1, keepdim=True).values
    total_R1 = _total_weights(logits_RV, best_R1)[:, None]
    chosen_RK = ids_R1
    if most:
        chosen_RK = torch.cat((ids_R1, largest_few(logits_RV, most)[1]), dim=1)
    picked_RK = logits_RV.gather(1, chosen_RK)
    values_RK = (picked_RK.double() - best_R1.double() - total_R1.log()).clamp_(-LARGEST, 0.0)
    columns = chosen_RK.cpu().numpy().astype(np.int32), values_RK.float().cpu().numpy()
    entries: list[Entry] = []
    for row_ids_K, row_values_K, wanted in zip(*columns, num_likely, strict=True):
        is_shown_K = row_ids_K[: wanted + 1] != row_ids_K[0]
        is_shown_K[0] = True
        entries.append(
            (row_ids_K[: wanted + 1][is_shown_K], row_values_K[: wanted + 1][is_shown_K])
        )
    return entries


def _total_weights(logits_RV: torch.Tensor, best_R1: torch.Tensor) -> torch.Tensor:
    """[R] float64: the sum of exp(logit - best), by blocks of the vocabulary in one order."""
    weights_RV = torch.exp(logits_RV - best_R1)
    weights_RGB = F.pad(weights_RV, (0, -weights_RV.shape[1] % BLOCK)).view(
        len(logits_RV), -1, BLOCK
    )
    return weights_RGB.sum(dim=2, dtype=torch.float64).cumsum(dim=1)[:, -1]


class TokenScores:
    """The entries of a completion's tokens, one after the other."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def push(self, entry: Entry) -> None:
        """Of the next token."""
        self._entries.append(entry)

    def result(self, num_tokens: int) -> Logprobs:
        """Of the first `num_tokens` tokens."""
        assert len(self._entries) >= num_tokens, f"{len(self._entries)} scores, {num_tokens} tokens"
        return _joined(self._entries[:num_tokens])


class PromptScores:
    """The entries of a prompt's tokens, as chunks of it are computed; the first token has none."""

    def __init__(self, num_tokens: int, num_likely: int) -> None:
        self.num_tokens = num_tokens
        self.num_likely = num_likely
        self.is_finite = True  # of all logits seen so far
        self._entries: list[Entry] = [NO_ENTRY]

    @property
    def is_complete(self) -> bool:
        """Whether every token has its entry, so that no row need be computed for one."""
        return len(self._entries) >= self.num_tokens

    def targets(self, start: int, num_tokens: int) -> range:
        """Tokens whose entries the rows `start`, … of the prompt give and that are wanted."""
        first = max(len(self._entries), start + 1)
        return range(first, max(first, min(start + num_tokens, self.num_tokens - 1) + 1))

    def push(self, entries: Items[Entry]) -> None:
        """Of the next tokens."""
        self._entries.extend(entries)

    def result(self) -> Logprobs:
        """Of the whole prompt."""
        assert self.is_complete, f"{len(self._entries)} of {self.num_tokens} tokens have a score"
        return _joined(self._entries)


def _joined(entries: Items[Entry]) -> Logprobs:
    parts = [NO_ENTRY, *entries]
    return Logprobs(
        token_ids=np.concatenate([ids for ids, _ in parts]),
        values=np.concatenate([values for _, values in parts]),
        ends=np.cumsum([len(ids) for ids, _ in entries], dtype=np.int32),
    )
