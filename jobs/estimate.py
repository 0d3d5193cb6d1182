"""How long completions turn out, learned while the job runs: a quantile over log-spaced bins."""

from batchmla.core import SamplingParams

_BINS_PER_DOUBLING = 4
_PRIOR_TOKENS = 256  # until rows have finished
_QUANTILE = 0.75
_HALVE_AT = 4096  # old rows fade: the input may change its nature


class LengthEstimate:
    """Expected tokens of a completion: too low costs a preemption, too high an idle lane."""

    def __init__(self) -> None:
        self._counts = [0] * (_BINS_PER_DOUBLING * 40)
        self._total = 0
        self._seen_since = 0
        self._expected = _PRIOR_TOKENS

    def add(self, num_tokens: int) -> None:
        """Learns from a finished row."""
        self._counts[_bin(num_tokens)] += 1
        self._total += 1
        self._seen_since += 1
        if self._seen_since >= 32 or self._total <= 32:
            self._settle()

    def expected(self, params: SamplingParams) -> int:
        """For a row with these limits; exact where nothing but max_tokens can end it."""
        if params.max_tokens is not None and not (params.stop_ids or params.stop or params.grammar):
            return max(1, params.max_tokens)
        expected = self._expected
        if params.budget is not None and self._total == 0:
            expected += params.budget.max_reasoning_tokens or 0
        expected = max(expected, params.min_tokens, 1)
        return expected if params.max_tokens is None else min(expected, params.max_tokens)

    @property
    def count(self) -> int:
        """Rows learned from; those that have faded count half."""
        return self._total

    def _settle(self) -> None:
        self._seen_since = 0
        wanted, passed = self._total * _QUANTILE, 0
        for bin_index, count in enumerate(self._counts):
            passed += count
            if passed >= wanted:
                self._expected = _upper_tokens(bin_index)
                break
        if self._total >= _HALVE_AT:
            self._counts = [count // 2 for count in self._counts]
            self._total = sum(self._counts)


def _bin(num_tokens: int) -> int:
    """Bin b holds the lengths up to 2^((b + 1) / 4), exact for small ones."""
    num_tokens = num_tokens or 1
    exponent = num_tokens.bit_length() - 1
    rest = (num_tokens << 8 >> exponent) - 256  # 0..255: the mantissa
    return exponent * _BINS_PER_DOUBLING + (rest * _BINS_PER_DOUBLING >> 8)


def _upper_tokens(bin_index: int) -> int:
    exponent, quarter = divmod(bin_index, _BINS_PER_DOUBLING)
    return max(1, -(-((_BINS_PER_DOUBLING + quarter + 1) << exponent) // _BINS_PER_DOUBLING) - 1)
