"""One prompt on its way through the engine: the only type whose fields change between steps."""

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from batchmla.core import Budget, Completion, FinishReason, Prompt, TextCut, TokenIds
from batchmla.engine.budget import BudgetState, BudgetWatch
from batchmla.engine.extras import Extras
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

    def truncate(self, count: int) -> None:
        """Drops all values but the first `count`."""
        assert count <= self._num, f"{count} of {self._num} values"
        self._num = count

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
        self.group = 0  # while it runs: the attention group that it is in
        self.lane = 0  # while it runs: no other running sequence has it
        self.hashes: list[PageHash] = []
        self.published = 0  # leading pages already offered for sharing
        self.shared_pages = 0  # leading pages taken from the prefix cache at the last admission
        self.cached_tokens: int | None = None  # prompt tokens of the first admission's hit
        self.forced_at: int | None = None
        self.trimmed_bytes = 0  # of the last token, that belong to a stop string
        self.first_token_at_s: float | None = None
        self.is_ahead = False  # its last token is drawn, but not known here: a 0 stands for it
        self.is_over = False
        budget: Budget | None = params.budget
        self.budget = None if budget is None else BudgetWatch(budget)
        self.extras = Extras(prompt) if params.has_extras else None

    @property
    def wanted(self) -> int:
        """Tokens left to compute before the sequence can be sampled."""
        return self.num_tokens - self.computed

    @property
    def budget_state(self) -> BudgetState | None:
        """Where the sequence stands with respect to its reasoning, None if nobody follows that."""
        return None if self.budget is None else self.budget.state

    @property
    def scores_prompt(self) -> bool:
        """Whether rows of the prompt are still wanted for their logits."""
        scores = None if self.extras is None else self.extras.prompt_scores
        return scores is not None and not scores.is_complete

    @property
    def can_run_ahead(self) -> bool:
        """Whether the step after the next token needs no more than the device knows."""
        if self.extras is not None or self.prompt.params.repetition_penalty != 1.0:
            return False
        is_last = self.num_tokens + 1 >= self.max_total
        return not is_last and (self.budget is None or self.budget.is_free_after_next)

    def run_ahead(self) -> None:
        """Counts the token that is being drawn."""
        self.tokens.append(0)
        self.num_tokens += 1
        self.num_generated += 1
        self.is_ahead = True

    def take_back(self) -> None:
        """Before that token is pushed."""
        self.num_tokens -= 1
        self.num_generated -= 1
        self.tokens.truncate(self.num_tokens)
        self.is_ahead = False

    def forced_token(self) -> int | None:
        """The token that the reasoning budget dictates next, if any."""
        return None if self.budget is None else self.budget.forced()

    def sure_token(self) -> int | None:
        """The next token where a grammar settles it whatever the model says, if that is known."""
        if self.extras is None:
            return None
        token_id = self.extras.sure_id(self.num_generated, self.budget_state)
        return None if token_id in self.prompt.params.stop_ids else token_id

    def push(self, token_id: int, *, is_forced: bool) -> FinishReason | None:
        """Takes the token drawn or forced for the next position; the reason if that ended the
        sequence.

        A stop id is not appended, and what follows a stop string is taken off again. Forced tokens
        never stop a sequence, but they count towards its length.
        """
        if not is_forced and token_id in self.prompt.params.stop_ids:
            if self.extras is not None:
                self._cut(self.extras.finish())
            return FinishReason.STOP
        if is_forced and self.forced_at is None:
            self.forced_at = self.num_generated
        self.tokens.append(token_id)
        self.num_tokens += 1
        self.num_generated += 1
        before = None if self.extras is None else self.budget_state
        if self.budget is not None:
            self.budget.push(token_id)
        if self.extras is not None and self._ends_by_extras(self.extras, token_id, before):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_total else None

    def _ends_by_extras(self, extras: Extras, token_id: int, before: BudgetState | None) -> bool:
        """Whether a stop string or a grammar ends the sequence with the token just appended."""
        cut = extras.push(token_id, self.num_generated - 1, before, self.budget_state)
        if cut is None and self.num_tokens >= self.max_total:
            cut = extras.finish()
        return self._cut(cut) or extras.is_over

    def _cut(self, cut: TextCut | None) -> bool:
        """Takes off what a stop string ends; False if there is nothing to cut."""
        if cut is None:
            return False
        self.num_generated = cut.num_tokens
        self.num_tokens = self.prompt_tokens + cut.num_tokens
        self.tokens.truncate(self.num_tokens)
        self.trimmed_bytes = cut.trimmed_bytes
        if self.forced_at is not None and self.forced_at >= cut.num_tokens:
            self.forced_at = None
        return True

    def completion(self, reason: FinishReason) -> Completion:
        """The finished row."""
        token_ids: TokenIds = self.tokens.view[self.prompt_tokens :].copy()
        extras = self.extras
        scores = None if extras is None else extras.scores
        prompt_scores = None if extras is None else extras.prompt_scores
        has_looped = self.budget is not None and self.budget.has_looped
        return Completion(
            row_id=self.prompt.row_id,
            index=self.prompt.index,
            sample=self.prompt.sample,
            token_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            forced_at=self.forced_at,
            has_looped=has_looped and self.forced_at is not None,
            trimmed_bytes=self.trimmed_bytes,
            logprobs=None if scores is None else scores.result(self.num_generated),
            prompt_logprobs=None if prompt_scores is None else prompt_scores.result(),
            first_token_at_s=self.first_token_at_s,
        )

    def not_finite(self) -> str:
        """What to say where the logits were not. Of a prompt no position: one value spoils all rows
        that are computed together with its own, also those before it."""
        where = f"in its prompt of {self.prompt_tokens} tokens"
        if self.num_generated:
            where = (
                f"after {self.num_tokens} tokens ({self.prompt_tokens} of them the prompt's), at "
                f"position {self.num_tokens}"
            )
        return (
            f"row {self.prompt.row_id}: the model gave logits that are not finite {where}; try "
            "model.dtype: float32"
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
