"""How many sequences may run at once: a forecast of the pages they will hold until they finish.
 Every running sequence is expected to grow by r more tokens. While it lives all of them grow in
step, so the pool is fullest right before some sequence ends. With sequences sorted by r, longest
first, those alive after r_i steps are 1..i, and the pages they hold then are

    shared + Σ_{j≤i} ( private_j + ceil(r_i / page_tokens) )

The largest of these over i is the forecast; admission keeps it within the pool.
"""

from collections.abc import Iterable

import numpy as np

from batchmla.engine.sequence import Sequence


class LengthEstimator:
    """The expected length of a completion, learned from finished ones.

    Mean plus mean deviation, both as running averages that start from `prior_tokens` and forget
    slowly.
    """

    def __init__(self, prior_tokens: int = 512, memory: int = 256) -> None:
        self._mean = float(prior_tokens)
        self._deviation = 0.0
        self._memory = memory
        self._count = 0

    def observe(self, num_generated: int) -> None:
        """Learns from a finished completion."""
        self._count += 1
        share = 1 / min(self._count, self._memory)
        self._deviation += share * (abs(num_generated - self._mean) - self._deviation)
        self._mean += share * (num_generated - self._mean)

    @property
    def expected_tokens(self) -> int:
        return max(1, round(self._mean + self._deviation))

    def remaining(self, sequence: Sequence, page_tokens: int) -> int:
        """Tokens the sequence is expected to grow by; one that outlived its estimate, by a quarter
        again.
        """
        expected = sequence.prompt.expected_tokens or self.expected_tokens
        generated = sequence.num_generated
        left = expected - generated
        if left <= 0:
            left = max(generated // 4, page_tokens)
        return min(left, sequence.max_total - sequence.num_tokens)


class Forecast:
    """The peak of the running sequences' pages, extended one candidate at a time."""

    def __init__(
        self,
        running: Iterable[Sequence],
        estimator: LengthEstimator,
        *,
        used_pages: int,
        page_tokens: int,
    ) -> None:
        self._estimator = estimator
        self._page_tokens = page_tokens
        self._private: list[int] = []
        self._remaining: list[int] = []
        for sequence in running:
            self._private.append(len(sequence.pages) - sequence.shared_pages)
            self._remaining.append(estimator.remaining(sequence, page_tokens))
        self._shared_pages = max(0, used_pages - sum(self._private))

    def peak_pages(self, candidate: Sequence, new_pages: int, reused_idle_pages: int) -> int:
        """The forecast if `candidate` joined with `new_pages` of its own and so many idle ones
        taken up.
        """
        growth = self._estimator.remaining(candidate, self._page_tokens)
        private = np.array([*self._private, new_pages], np.int64)
        remaining = np.array([*self._remaining, growth], np.int64)
        order = np.argsort(-remaining, kind="stable")
        held = np.cumsum(private[order])
        alive = np.arange(1, len(order) + 1)
        grown = alive * -(-remaining[order] // self._page_tokens)
        return self._shared_pages + reused_idle_pages + int(np.max(held + grown))

    def add(self, candidate: Sequence, new_pages: int, reused_idle_pages: int) -> None:
        """Counts an admitted candidate as running."""
        self._private.append(new_pages)
        self._remaining.append(self._estimator.remaining(candidate, self._page_tokens))
        self._shared_pages += reused_idle_pages
