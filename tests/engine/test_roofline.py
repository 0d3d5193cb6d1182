"""The roofline's arithmetic, on numbers small enough to check by hand."""

from batchmla.engine.roofline import Rates, Workload, measure_cpu_rates, predict_seconds

WORK = Workload(
    prompt_tokens=1000,
    output_tokens=400,
    num_rows=10,
    concurrency=4,
    active_params=50,
    weight_bytes=2000,
    kv_token_bytes=8.0,
)


def test_bytes_bound_decode() -> None:
    # prefill 2*50*1000/1e6 = 0.1 s; 100 steps of (2000 + 4 * 120 tokens * 8 B) / 1e4 B/s = 0.584 s
    assert predict_seconds(WORK, Rates(flops_per_s=1e6, bytes_per_s=1e4)) == 0.1 + 100 * 0.584


def test_flops_bound_decode() -> None:
    # 100 steps of 2 * 50 * 4 flops at 100 flop/s = 4 s each
    assert predict_seconds(WORK, Rates(flops_per_s=100.0, bytes_per_s=1e9)) == 1000 + 400


def test_measured_rates_are_positive_and_of_a_machine() -> None:
    rates = measure_cpu_rates("float32")
    assert 1e8 < rates.flops_per_s < 1e15
    assert 1e7 < rates.bytes_per_s < 1e13
