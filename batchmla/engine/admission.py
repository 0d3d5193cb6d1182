"""How many sequences may run at once: a forecast of the pages they will hold until they finish.

Every running sequence is expected to grow by r more tokens. While it lives all of them grow in
step, so the pool is fullest right before some sequence ends. With sequences sorted by r, longest
first, those alive after r_i steps are 1..i, and the pages they hold then are

    shared + Σ_{j≤i} ( private_j + ceil(r_i / page_tokens) )

The largest of these over i is the forecast; admission keeps it within the pool.
"""

import numpy as np

from batchmla.engine.sequence import Sequence


class LengthEstimator:
    """The expected length of a completion: `prior_tokens`, soon the experience with finished ones.

    Experience is the mean plus the mean deviation, both as running averages in which completions
    fade once there are `memory` of them.
    """

    def __init__(self, prior_tokens: int = 512, *, enough: int = 8, memory: int = 256) -> None:
        self._prior_tokens = prior_tokens
        self._enough = enough
        self._memory = memory
        self._count = 0
        self._mean = 0.0
        self._deviation = 0.0

    def observe(self, num_generated: int) -> None:
        """Learns from a finished completion."""
        self._count += 1
        share = 1 / min(self._count, self._memory)
        self._mean += share * (num_generated - self._mean)
        self._deviation += share * (abs(num_generated - self._mean) - self._deviation)

    @property
    def expected_tokens(self) -> int:
        if self._count < self._enough:
            return self._prior_tokens
        return max(1, round(self._mean + self._deviation))


def remaining_tokens(sequence: Sequence, expected_tokens: int, page_tokens: int) -> int:
    """Tokens a sequence should still grow by; one that outlived the estimate, a quarter again."""
    generated = sequence.num_generated
    left = (sequence.prompt.expected_tokens or expected_tokens) - generated
    if left <= 0:
        left = max(generated // 4, page_tokens)
    return min(left, sequence.max_total - sequence.num_tokens)


class Forecast:
    """The peak of the running sequences' pages, extended one candidate at a time.

    Short completions finish first and would make the estimate too low; it is therefore never taken
    below what the running sequences have generated on average.
    """

    def __init__(
        self, running: list[Sequence], expected_tokens: int, *, used_pages: int, page_tokens: int
    ) -> None:
        self._page_tokens = page_tokens
        self._private = [len(sequence.pages) - sequence.shared_pages for sequence in running]
        if running:
            generated = sum(sequence.num_generated for sequence in running)
            expected_tokens = max(expected_tokens, generated // len(running))
        self._expected_tokens = expected_tokens
        self._remaining = [self._growth(sequence) for sequence in running]
        self._shared_pages = max(0, used_pages - sum(self._private))

    def growth_pages(self, candidate: Sequence) -> int:
        """Pages the candidate is expected to need besides those for its tokens so far."""
        return -(-self._growth(candidate) // self._page_tokens)

    def peak_pages(self, candidate: Sequence, new_pages: int, reused_idle_pages: int) -> int:
        """The peak if `candidate` joined with `new_pages` of its own and so many idle ones."""
        private = np.array([*self._private, new_pages], np.int64)
        remaining = np.array([*self._remaining, self._growth(candidate)], np.int64)
        order = np.argsort(-remaining, kind="stable")
        held = np.cumsum(private[order])
        alive = np.arange(1, len(order) + 1)
        grown = alive * -(-remaining[order] // self._page_tokens)
        return self._shared_pages + reused_idle_pages + int(np.max(held + grown))

    def add(self, candidate: Sequence, new_pages: int, reused_idle_pages: int) -> None:
        """Counts an admitted candidate as running."""
        self._private.append(new_pages)
        self._remaining.append(self._growth(candidate))
        self._shared_pages += reused_idle_pages

    def _growth(self, sequence: Sequence) -> int:
        return remaining_tokens(sequence, self._expected_tokens, self._page_tokens)
