"""The pages that running sequences will hold until they end, for admission.

How long a sequence goes on is a matter of chance, learned from those that ended (`lengths`). At t
tokens from now it holds its pages with probability P(it is longer than that | it has come so far),
so the pages of all are expected to be

    shared + Σ P_j(t) pages_j(t)   with the variance   Σ P_j(t) (1 - P_j(t)) pages_j(t)²

The largest expectation over t, plus `MARGIN` standard deviations, is the forecast. Where lengths
are certain the variance is 0 and the forecast is the exact peak. S sequences, K points of time.
"""

from dataclasses import dataclass

import numpy as np

from batchmla.engine.lengths import Floats, Ints, LengthEstimator, bins
from batchmla.engine.sequence import Sequence

MARGIN = 1.0
_FINE_POINTS = 24  # a page apart; then each a sixteenth further away than the one before


def time_points(page_tokens: int, most_tokens: int) -> Ints:
    """Tokens from now, from 0 to beyond `most_tokens`: [K], at least two."""
    points = [0, page_tokens]
    while points[-1] <= most_tokens:
        is_fine = len(points) < _FINE_POINTS
        points.append(points[-1] + max(page_tokens, 0 if is_fine else points[-1] // 16))
    return np.array(points, np.int64)


@dataclass(frozen=True, slots=True)
class Addition:
    """What a candidate would add: pages over time, their variance, idle pages that it holds."""

    mean_K: Floats
    variance_K: Floats
    idle_pages: int


class Forecast:
    """The pages of the running sequences over time, extended one candidate at a time.

    It holds for some steps: all sequences then have as many tokens more, and those that have ended
    are still counted.
    """

    def __init__(
        self,
        running: list[Sequence],
        lengths: LengthEstimator,
        *,
        used_pages: int,
        page_tokens: int,
        most_tokens: int,
    ) -> None:
        """`most_tokens`: that a sequence may still generate."""
        self.most_tokens = most_tokens
        self._page_tokens = page_tokens
        self._expected_tokens = lengths.expected_tokens
        self._starts_K = time_points(page_tokens, most_tokens)
        generated_S = np.array([each.num_generated for each in running], np.float64)
        expected_S = self._expected(running)
        self._survival_B = lengths.survival(generated_S, expected_S)
        held_S = np.array([each.num_tokens for each in running], np.int64)
        shared_S = np.array([each.shared_pages for each in running], np.int64)
        left_S = np.array([each.max_total - each.num_tokens for each in running], np.int64)
        mean_SK, variance_SK = self._pages(generated_S, expected_S, held_S, shared_S, left_S)
        self._mean_K = mean_SK.sum(axis=0)
        self._variance_K = variance_SK.sum(axis=0)
        private = sum(len(each.pages) - each.shared_pages for each in running)
        self._shared_pages = max(0, used_pages - private)

    def growth_pages(self, candidate: Sequence) -> int:
        """Pages the candidate is expected to need besides those for its tokens so far."""
        expected = candidate.prompt.expected_tokens or self._expected_tokens
        left = max(expected - candidate.num_generated, self._page_tokens)
        return -(-min(left, candidate.max_total - candidate.num_tokens) // self._page_tokens)

    def addition(self, candidate: Sequence, new_pages: int, reused_idle_pages: int) -> Addition:
        """Of a candidate with `new_pages` of its own and so many idle ones."""
        whole = -(-candidate.num_tokens // self._page_tokens)
        mean_SK, variance_SK = self._pages(
            np.array([candidate.num_generated], np.float64),
            self._expected([candidate]),
            np.array([candidate.num_tokens], np.int64),
            np.array([whole - new_pages], np.int64),
            np.array([candidate.max_total - candidate.num_tokens], np.int64),
        )
        return Addition(mean_SK[0], variance_SK[0], reused_idle_pages)

    def peak_pages(self, addition: Addition) -> int:
        """The peak if a candidate joined."""
        spread_K = np.sqrt(self._variance_K + addition.variance_K)
        peak = np.max(self._mean_K + addition.mean_K + MARGIN * spread_K)
        return self._shared_pages + addition.idle_pages + int(np.ceil(peak - 1e-6))

    def add(self, addition: Addition) -> None:
        """Counts an admitted candidate as running."""
        self._mean_K = self._mean_K + addition.mean_K
        self._variance_K = self._variance_K + addition.variance_K
        self._shared_pages += addition.idle_pages

    def _expected(self, sequences: list[Sequence]) -> Floats:
        usual = self._expected_tokens
        return np.array([each.prompt.expected_tokens or usual for each in sequences], np.float64)

    def _pages(
        self, generated_S: Floats, expected_S: Floats, held_S: Ints, shared_S: Ints, left_S: Ints
    ) -> tuple[Floats, Floats]:
        """Mean and variance of the pages of each; what holds from a point on is taken as it is at
        the next one.
        """
        starts_K = self._starts_K
        ends_K = np.append(starts_K[1:], starts_K[-1])
        grown_SK = held_S[:, None] + np.minimum(ends_K, left_S[:, None])
        pages_SK = -(-grown_SK // self._page_tokens) - shared_S[:, None]
        reached_SK = (generated_S[:, None] + starts_K) / expected_S[:, None]
        survival_SK = self._survival_B[bins(reached_SK)]
        so_far_S = survival_SK[:, :1]
        is_known = so_far_S > 0
        alive_SK = np.divide(survival_SK, so_far_S, where=is_known, out=np.zeros_like(survival_SK))
        longer_S = np.maximum(generated_S / 4, self._page_tokens)[:, None]
        alive_SK = np.where(is_known, alive_SK, starts_K < longer_S)  # it outlived all before it
        alive_SK = np.where(starts_K < left_S[:, None], alive_SK, 0.0)
        mean_SK = alive_SK * pages_SK
        return mean_SK, mean_SK * pages_SK * (1 - alive_SK)
