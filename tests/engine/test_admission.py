"""Who is admitted while a forecast of pages is some steps old."""

import numpy as np
import pytest
from fakes import ListSource, make_prompt
from watched import WatchedEngine, run

from batchmla.core import Prompt, SamplingParams
from batchmla.engine import scheduler
from batchmla.engine.forecast import Forecast
from batchmla.engine.group import Group


def prompts(count: int) -> list[Prompt]:
    """Rows that end one after the other, so that there is somebody to admit at most steps."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 24, count).tolist()
    return [
        make_prompt(
            index,
            [index % 90 + 1] * 12,
            SamplingParams(temperature=0.0, max_tokens=length),
            expected_tokens=length,
        )
        for index, length in enumerate(lengths)
    ]


class Counted(WatchedEngine):
    """Counts the forecasts that are made."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(
            num_pages=num_pages, max_model_len=40, max_num_seqs=12, max_batched_tokens=64
        )
        self.forecasts = 0
        make = self._scheduler._forecast

        def count(group: Group) -> Forecast:
            self.forecasts += 1
            return make(group)

        self._scheduler._forecast = count  # type: ignore[method-assign]


def test_while_pages_last_one_forecast_serves_several_steps() -> None:
    engine = Counted(num_pages=400)
    assert len(run(engine, prompts(200))) == 200
    stats = engine.stats()
    assert stats.preemptions == 0
    assert stats.steps / scheduler.FORECAST_STEPS <= engine.forecasts <= stats.steps / 4


@pytest.mark.parametrize("num_pages", [30, 45])
def test_an_old_forecast_keeps_nobody_out_and_lets_nobody_in_too_early(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Counted(num_pages)
    run(kept, prompts(200))
    monkeypatch.setattr(scheduler, "FORECAST_STEPS", 1)
    fresh = Counted(num_pages)
    run(fresh, prompts(200))
    assert kept.stats().steps <= 1.01 * fresh.stats().steps
    assert kept.stats().preemptions <= fresh.stats().preemptions + 2
    assert fresh.forecasts >= kept.forecasts > 0


def test_a_preemption_ends_a_forecast() -> None:
    engine = Counted(num_pages=11)
    short = [
        make_prompt(index, [index + 1] * 8, SamplingParams(temperature=0.0, max_tokens=24),
                    expected_tokens=2)
        for index in range(6)
    ]  # fmt: skip
    before = 0
    for _ in engine.generate(ListSource(short)):
        before = max(before, engine.stats().preemptions)
    assert before > 0 and engine.forecasts > before
