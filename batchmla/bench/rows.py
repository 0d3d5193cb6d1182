"""Rows for a measurement: random prompts of one length, and a source that keeps so many of them in
the engine. Knows no engine.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchmla.core import Completion, Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`rows` rows of equal lengths, at most `concurrency` of them in the engine at once."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    rows: int

    @property
    def row_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.output_tokens

    @property
    def together(self) -> int:
        """The most rows in the engine."""
        return min(self.rows, self.concurrency)


def make_rows(load: Load, *, vocab_size: int, seed: Sequence[int]) -> list[Prompt]:
    """Greedy rows that nothing but their length ends; another seed gives other tokens, so that the
    prefix cache has none of them.
    """
    random = np.random.default_rng(seed)
    ids_RT = random.integers(0, vocab_size, (load.rows, load.prompt_tokens), dtype=np.int32)
    params = SamplingParams(temperature=0.0, max_tokens=load.output_tokens)
    return [
        Prompt(row_id=str(index), index=index, params=params, token_ids=ids_T)
        for index, ids_T in enumerate(ids_RT)
    ]


class SteadySource:
    """A `PromptSource` that has at most `concurrency` rows in the engine: the next one enters when
    one has ended. Notes when each was taken, on the clock of `time.perf_counter`.
    """

    def __init__(self, prompts: Sequence[Prompt], concurrency: int) -> None:
        self.taken_at_s: dict[int, float] = {}
        self._prompts = prompts
        self._concurrency = concurrency
        self._num_ended = 0

    def take(self, limit: int, *, wait: bool) -> Sequence[Prompt]:
        """The next rows that may enter; with none in the engine there is nothing to wait for."""
        start = len(self.taken_at_s)
        room = self._concurrency - (start - self._num_ended)
        taken = self._prompts[start : start + max(0, min(limit, room))]
        now_s = time.perf_counter()
        self.taken_at_s.update((prompt.index, now_s) for prompt in taken)
        return taken

    def ended(self, completion: Completion) -> float:
        """Notes that a row has ended; seconds since it was taken."""
        self._num_ended += 1
        return time.perf_counter() - self.taken_at_s[completion.index]
