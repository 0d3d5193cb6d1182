"""The forecast of pages: exact where lengths are certain, a matter of chance where they are not."""

import numpy as np
import pytest

from batchmla.core import Prompt, SamplingParams
from batchmla.engine.forecast import Forecast
from batchmla.engine.lengths import LengthEstimator, bins
from batchmla.engine.sequence import Sequence

PAGE = 4


def running(
    prompt_tokens: int, generated: int, limit: int, expected: int | None = None
) -> Sequence:
    """A sequence that has generated so much and holds its pages."""
    prompt = Prompt(
        row_id="r", index=0, params=SamplingParams(max_tokens=limit),
        token_ids=np.zeros(prompt_tokens, np.int32), expected_tokens=expected,
    )  # fmt: skip
    sequence = Sequence(prompt, arrival=0, max_model_len=10_000)
    for _ in range(generated):
        sequence.push(5, is_forced=False)
    sequence.pages.extend(list(range(-(-sequence.num_tokens // PAGE))))
    return sequence


def ended(num_generated: int, expected: int = 100) -> Sequence:
    return running(1, num_generated, 10_000, expected)


def forecast_of(sequences: list[Sequence], lengths: LengthEstimator | None = None) -> Forecast:
    used = sum(len(each.pages) for each in sequences)
    estimator = lengths or LengthEstimator(100)
    return Forecast(sequences, estimator, used_pages=used, page_tokens=PAGE, most_tokens=9999)


def peak_of(forecast: Forecast, candidate: Sequence, new_pages: int) -> int:
    return forecast.peak_pages(forecast.addition(candidate, new_pages, 0))


def exact_peak(rows: list[tuple[int, int]]) -> int:
    """Pages at the fullest moment of (tokens now, tokens left), all growing in step."""
    return max(
        sum(-(-(tokens + t) // PAGE) for tokens, left in rows if t <= left)
        for t in range(max(left for _, left in rows) + 1)
    )


@pytest.mark.parametrize("seed", range(5))
def test_certain_lengths_give_the_exact_peak_within_a_page_each(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [tuple(int(n) for n in rng.integers(1, 90, 2)) for _ in range(12)]
    sequences = [running(tokens, 0, left, expected=left) for tokens, left in rows]
    candidate = sequences.pop()
    peak = peak_of(forecast_of(sequences), candidate, -(-candidate.num_tokens // PAGE))
    assert exact_peak(rows) <= peak <= exact_peak(rows) + len(rows)


def test_an_added_candidate_counts_as_running() -> None:
    sequences = [running(10 * i, i, 50, expected=40) for i in range(1, 6)]
    candidate, another = running(20, 0, 50, expected=40), running(8, 0, 50, expected=40)
    candidate.pages.truncate(0)
    forecast = forecast_of(sequences)
    forecast.add(forecast.addition(candidate, 5, 2))
    together = forecast_of([*sequences, running(20, 0, 50, expected=40)])
    assert peak_of(forecast, another, 2) == peak_of(together, another, 2) + 2


def test_chance_makes_the_forecast_less_than_all_at_their_longest() -> None:
    rng = np.random.default_rng(7)
    lengths, estimator = rng.integers(10, 200, 500), LengthEstimator(100)
    for length in lengths:
        estimator.observe(ended(int(length)))
    sequences = [running(10, 0, 300, expected=100) for _ in range(40)]
    peak = peak_of(forecast_of(sequences[1:], estimator), sequences[0], 3)
    drawn = [
        exact_peak([(10, int(length)) for length in rng.choice(lengths, 40)]) for _ in range(200)
    ]
    assert np.mean(drawn) < peak < 1.15 * np.mean(drawn)
    assert peak < 0.75 * 40 * (310 // PAGE)


def test_who_has_outlived_the_others_is_given_a_quarter_more() -> None:
    estimator = LengthEstimator(100)
    for _ in range(900):
        estimator.observe(ended(50))
    old = running(10, 4000, 9000, expected=100)
    peak = peak_of(forecast_of([old], estimator), running(1, 0, 1, expected=1), 1)
    assert (4010 + 990) // PAGE <= peak <= (4010 + 1010) // PAGE + 20


def test_running_completions_correct_what_the_first_to_end_would_say() -> None:
    """Of a hundred that began together twenty have ended at 10 tokens, and 80 still run at 60."""
    estimator = LengthEstimator(100)
    for _ in range(20):
        estimator.observe(ended(10))
    generated, expected = np.full(80, 60.0), np.full(80, 100.0)
    survival = estimator.survival(generated, expected)
    assert survival[bins(np.array(0.5))] == pytest.approx(82 / 102)
    assert survival[bins(np.array(0.99))] > 0 == survival[bins(np.array(1.0))]
    alone = estimator.survival(np.zeros(0), np.zeros(0))
    assert alone[bins(np.array(0.5))] == pytest.approx(2 / 22)


def test_old_experience_fades() -> None:
    estimator = LengthEstimator(100)
    for _ in range(9000):
        estimator.observe(ended(400))
    for _ in range(9000):
        estimator.observe(ended(20))
    none = np.zeros(0)
    assert estimator.survival(none, none)[bins(np.array(1.0))] < 0.2
