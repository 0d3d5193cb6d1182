"""One prompt on its way through the engine: the only type whose fields change between steps."""

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from batchmla.core import Budget, Completion, FinishReason, Prompt, TokenIds
from batchmla.engine.budget import BudgetWatch
from batchmla.kv.pages import PageHash

IntType = TypeVar("IntType", np.int32, np.int64)


class GrowingIds(Generic[IntType]):
    """An integer array that grows at its end, twice as large each time it is full."""

    def __init__(self, values: npt.ArrayLike, dtype: type[IntType]) -> None:
        start = np.asarray(values, dtype)
        self._num = len(start)
        self._data: npt.NDArray[IntType] = np.empty(max(16, 2 * self._num), dtype)
        self._data[: self._num] = start

    def __len__(self) -> int:
        return self._num

    @property
    def view(self) -> npt.NDArray[IntType]:
        """The values, not copied; valid until more are added."""
        return self._data[: self._num]

    def append(self, value: int) -> None:
        """Adds one value."""
        if self._num == len(self._data):
            self._grow(self._num + 1)
        self._data[self._num] = value
        self._num += 1

    def extend(self, values: list[int]) -> None:
        """Adds several values."""
        end = self._num + len(values)
        if end > len(self._data):
            self._grow(end)
        self._data[self._num : end] = values
        self._num = end

    def _grow(self, least: int) -> None:
        grown = np.empty(max(least, 2 * len(self._data)), self._data.dtype)
        grown[: self._num] = self._data[: self._num]
        self._data = grown


class Sequence:
    """Tokens known, tokens computed, pages held.

    `num_tokens` counts prompt and generated tokens, `computed` those whose rows are in the cache.
    The sequence is sampled when a step makes the two equal. `arrival` orders sequences by age.
    """

    def __init__(self, prompt: Prompt, *, arrival: int, max_model_len: int) -> None:
        params = prompt.params
        self.prompt = prompt
        self.arrival = arrival
        self.prompt_tokens = len(prompt.token_ids)
        self.tokens: GrowingIds[np.int32] = GrowingIds(prompt.token_ids, np.int32)
        self.num_tokens = self.prompt_tokens
        self.num_generated = 0
        most = max_model_len if params.max_tokens is None else params.max_tokens
        self.max_total = min(self.prompt_tokens + most, max_model_len)
        self.computed = 0
        self.pages: GrowingIds[np.int64] = GrowingIds((), np.int64)
        self.hashes: list[PageHash] = []
        self.published = 0  # leading pages already offered for sharing
        self.shared_pages = 0  # leading pages taken from the prefix cache at the last admission
        self.cached_tokens: int | None = None  # prompt tokens of the first admission's hit
        self.forced_at: int | None = None
        budget: Budget | None = params.budget
        self.budget = None if budget is None else BudgetWatch(budget)

    @property
    def wanted(self) -> int:
        """Tokens left to compute before the sequence can be sampled."""
        return self.num_tokens - self.computed

    def forced_token(self) -> int | None:
        """The token that the reasoning budget dictates next, if any."""
        return None if self.budget is None else self.budget.forced()

    def push(self, token_id: int, *, is_forced: bool) -> FinishReason | None:
        """Takes the token drawn or forced for the next position; the reason if that ended the
        sequence.

        A stop id is not appended. Forced tokens never stop a sequence, but they count towards its
        length.
        """
        if not is_forced and token_id in self.prompt.params.stop_ids:
            return FinishReason.STOP
        if is_forced and self.forced_at is None:
            self.forced_at = self.num_generated
        self.tokens.append(token_id)
        self.num_tokens += 1
        self.num_generated += 1
        if self.budget is not None:
            self.budget.push(token_id)
        return FinishReason.LENGTH if self.num_tokens >= self.max_total else None

    def completion(self, reason: FinishReason) -> Completion:
        """The finished row."""
        token_ids: TokenIds = self.tokens.view[self.prompt_tokens :].copy()
        return Completion(
            row_id=self.prompt.row_id,
            index=self.prompt.index,
            sample=self.prompt.sample,
            token_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            forced_at=self.forced_at,
        )

    def failure(self, error: str) -> Completion:
        """The row as failed; `error` is a sentence."""
        return failed(self.prompt, error, cached_tokens=self.cached_tokens or 0)


def failed(prompt: Prompt, error: str, *, cached_tokens: int = 0) -> Completion:
    """A completion that holds only the sentence saying why there is none."""
    return Completion(
        row_id=prompt.row_id,
        index=prompt.index,
        sample=prompt.sample,
        token_ids=np.empty(0, np.int32),
        finish_reason=FinishReason.ERROR,
        prompt_tokens=len(prompt.token_ids),
        cached_tokens=cached_tokens,
        error=error,
    )
