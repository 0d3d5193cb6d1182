"""The clockwork that predicts a job's time, against the steps of the engine itself."""

import numpy as np
import pytest
from fakes import make_prompt
from watched import WatchedEngine, run

from batchmla.core import SamplingParams
from batchmla.engine.calibration import StepTimes, fit, least_squares
from batchmla.engine.costs import StepCosts, StepWork
from batchmla.engine.meter import MOST_SAMPLES, StepMeter, TimedStep
from batchmla.engine.predict import MOST_ROWS, Bounds, JobRows, predict

COSTS = StepCosts(
    token_flops=10.0, sampled_flops=5.0, prompt_pair_flops=1.0, decode_pair_flops=2.0,
    fixed_bytes=100.0, expert_bytes=80.0, active_experts=0.25, kv_token_bytes=3.0,
)  # fmt: skip
TIMES = StepTimes(
    fixed_s=3e-3, token_s=4e-5, sampled_s=2e-4, weight_byte_s=1e-5, prompt_pair_s=3e-7,
    kv_token_s=2e-6,
)  # fmt: skip


def clock(work: StepWork) -> float:
    return TIMES.seconds(work, COSTS)


@pytest.mark.parametrize(
    ("pages", "seqs", "tokens"), [(4000, 16, 128), (4000, 4, 512), (60, 16, 64), (4000, 64, 33)]
)
def test_the_steps_foreseen_take_what_the_engines_take(pages: int, seqs: int, tokens: int) -> None:
    rng = np.random.default_rng(5)
    prompts_R = rng.integers(4, 90, 80)
    outputs_R = rng.integers(1, 60, 80)
    engine = WatchedEngine(
        num_pages=pages, page_tokens=4, max_model_len=160, max_num_seqs=seqs,
        max_batched_tokens=tokens,
    )  # fmt: skip
    prompts = []
    for index, (prompt, output) in enumerate(zip(prompts_R, outputs_R, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=int(output))
        ids = rng.integers(0, 97, prompt).tolist()
        prompts.append(make_prompt(index, ids, params, expected_tokens=int(output)))
    run(engine, prompts)
    taken_s = sum(clock(each.work) for each in engine.meter.samples)
    rows = JobRows(prompt_tokens_R=prompts_R, output_tokens_R=outputs_R)
    bounds = Bounds(max_num_seqs=seqs, max_batched_tokens=tokens, pool_tokens=4 * pages)
    found = predict(rows, bounds, clock)
    assert found.seconds == pytest.approx(taken_s, rel=0.1 if pages < 100 else 0.03)
    assert 0 < found.mean_rows <= seqs
    if pages > 100:
        assert found.steps == pytest.approx(len(engine.meter.samples), rel=0.03)


def test_a_step_by_hand() -> None:
    rows = JobRows(prompt_tokens_R=np.array([6]), output_tokens_R=np.array([3]))
    bounds = Bounds(max_num_seqs=1, max_batched_tokens=4, pool_tokens=100)
    works: list[StepWork] = []

    def seconds(work: StepWork) -> float:
        works.append(work)
        return 1.0

    assert predict(rows, bounds, seconds).seconds == 4.0
    assert works[0] == StepWork(tokens=4, sampled=0, prompt_pairs=10, decode_pairs=0, kv_tokens=4)
    assert works[1] == StepWork(tokens=2, sampled=1, prompt_pairs=11, decode_pairs=0, kv_tokens=6)
    assert works[2] == StepWork(tokens=1, sampled=1, prompt_pairs=0, decode_pairs=7, kv_tokens=7)


def test_cached_prompts_and_many_rows_take_their_share() -> None:
    lengths = np.full(100, 40)
    bounds = Bounds(max_num_seqs=10, max_batched_tokens=100, pool_tokens=10_000)
    whole = JobRows(prompt_tokens_R=lengths, output_tokens_R=np.full(100, 5))
    half = JobRows(prompt_tokens_R=lengths, output_tokens_R=np.full(100, 5), cached=0.5)
    tokens = [predict(rows, bounds, lambda w: float(w.tokens)).seconds for rows in (whole, half)]
    assert tokens[0] == 100 * (40 + 4) and tokens[1] == 100 * (20 + 4)
    many = MOST_ROWS * 3
    rows = JobRows(prompt_tokens_R=np.full(many, 40), output_tokens_R=np.full(many, 5))
    assert predict(rows, bounds, lambda w: float(w.tokens)).seconds == pytest.approx(many * 44)
    none = JobRows(prompt_tokens_R=np.zeros(0, np.int64), output_tokens_R=np.zeros(0, np.int64))
    assert predict(none, bounds, clock).seconds == 0.0


def samples(noise: float = 0.0) -> list[TimedStep]:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(120):
        rows, prompt = int(rng.integers(1, 64)), int(rng.choice([0, 0, 64, 500]))
        work = StepWork(
            tokens=rows + prompt, sampled=rows, prompt_pairs=prompt**2 // 2,
            decode_pairs=rows * 100, kv_tokens=int(rows * rng.integers(10, 900)) + prompt,
        )  # fmt: skip
        found.append(TimedStep(work, clock(work) * float(1 + noise * rng.standard_normal())))
    return found


def test_a_fit_finds_the_factors_again() -> None:
    times = fit(samples(), COSTS)
    assert times is not None
    for each in samples():
        assert times.seconds(each.work, COSTS) == pytest.approx(each.seconds, rel=0.02)
    noisy = fit(samples(noise=0.1), COSTS)
    assert noisy is not None
    errors = [noisy.seconds(s.work, COSTS) / s.seconds - 1 for s in samples()]
    assert abs(float(np.mean(errors))) < 0.03 and max(map(abs, errors)) < 0.2
    assert fit(samples()[:5], COSTS) is None


def test_disturbed_steps_count_for_the_sum_but_not_for_the_shape() -> None:
    steps = samples()
    slow = [TimedStep(s.work, s.seconds * (30 if n % 40 == 0 else 1)) for n, s in enumerate(steps)]
    calm, disturbed = fit(steps, COSTS), fit(slow, COSTS)
    assert calm is not None and disturbed is not None
    ratios = [
        disturbed.seconds(each.work, COSTS) / calm.seconds(each.work, COSTS) for each in steps
    ]
    assert max(ratios) / min(ratios) < 1.05, "the shape of a step moved"
    said = sum(disturbed.seconds(each.work, COSTS) for each in slow)
    assert said == pytest.approx(sum(each.seconds for each in slow), rel=1e-6)


def test_factors_are_never_negative() -> None:
    parts = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    found = least_squares(parts, np.array([3.0, 2.0, 1.0]))
    assert found.min() >= 0 and found[1] == 0 and found[0] == pytest.approx(2.0)


def test_a_meter_thins_what_it_keeps() -> None:
    meter = StepMeter()
    for _ in range(3 * MOST_SAMPLES):
        meter.add([], 1.0)
    assert MOST_SAMPLES // 2 <= len(meter.samples) < MOST_SAMPLES
