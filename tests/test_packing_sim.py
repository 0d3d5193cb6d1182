"""The packing simulator: its calendar gives the steps and seconds of the engine's own loop."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from packing_bound import bound_of
from packing_lazy import LazyEngine
from packing_machines import Machine, lite_h200, r1_8xh200, small_cpu
from packing_plain import SimulatedEngine
from packing_sim import simulate
from packing_trace import Trace, clustered, documents, realistic, reasoning

CASES = {
    "known lengths": (lambda: realistic(num_rows=150), lambda: small_cpu(4800)),
    "pages run out": (lambda: clustered(num_rows=120, is_known=False), lambda: small_cpu(6000)),
    "prefixes": (lambda: documents(num_rows=400), lambda: lite_h200(100_000)),
    "long completions": (lambda: reasoning(num_rows=40), lambda: r1_8xh200(50_000)),
}


@pytest.mark.parametrize("order", ["input", "packed", "packed-paced"])
@pytest.mark.parametrize("case", CASES)
def test_the_calendar_gives_the_steps_and_seconds_of_the_plain_loop(case: str, order: str) -> None:
    make_trace, make_machine = CASES[case]
    trace: Trace = make_trace()
    machine: Machine = make_machine()
    bound = bound_of(trace, machine)
    plain, lazy = (
        simulate(trace, machine, order=order, bound=bound, make_engine=make_engine)
        for make_engine in (SimulatedEngine, LazyEngine)
    )
    assert plain == lazy
    assert plain.steps > 20 and bound.seconds < plain.seconds
    if case == "pages run out":
        assert plain.preempted_share > 0
