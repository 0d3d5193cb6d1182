"""The two rates that are measured of a processor."""

from batchmla.engine.roofline import measure_cpu_rates


def test_measured_rates_are_positive_and_of_a_machine() -> None:
    rates = measure_cpu_rates("float32")
    assert 1e8 < rates.flops_per_s < 1e15
    assert 1e7 < rates.bytes_per_s < 1e13
