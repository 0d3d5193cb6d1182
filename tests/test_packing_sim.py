"""The packing simulator: its calendar gives the steps and seconds of the engine's own loop, and the
product's packing does in it what it is for.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from packing_bound import bound_of
from packing_lazy import LazyEngine
from packing_machines import Machine, lite_h200, r1_8xh200, small_cpu
from packing_plain import SimulatedEngine
from packing_results import keep
from packing_sim import simulate
from packing_trace import Trace, clustered, documents, realistic, reasoning

CASES = {
    "known lengths": (lambda: realistic(num_rows=120), lambda: small_cpu(4800)),
    "pages run out": (lambda: clustered(num_rows=120, is_known=False), lambda: small_cpu(6000)),
    "prefixes": (lambda: documents(num_rows=300), lambda: lite_h200(80_000)),
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


@pytest.fixture(scope="module")
def documents_on_a_gpu() -> tuple[Trace, Machine]:
    """Questions on documents, of which the pool holds a twentieth."""
    return documents(num_rows=1500), lite_h200(100_000)


def test_packing_and_pace_finish_documents_sooner(
    documents_on_a_gpu: tuple[Trace, Machine],
) -> None:
    trace, machine = documents_on_a_gpu
    bound = bound_of(trace, machine)
    plain, packed, paced = (
        simulate(trace, machine, order=order, bound=bound)
        for order in ("input", "packed", "packed-paced")
    )
    assert plain.seconds > 1.5 * packed.seconds and packed.seconds > 1.05 * paced.seconds
    assert paced.best_hit_share - paced.hit_share < 0.02
    assert paced.preempted_share < 0.01


@pytest.mark.parametrize("overlap", ["all", "some", "none"])
def test_no_order_beats_the_bound_of_the_device(
    documents_on_a_gpu: tuple[Trace, Machine], overlap: str
) -> None:
    trace, machine = documents_on_a_gpu
    bound = bound_of(trace, machine)
    found = simulate(trace, machine, order="packed-paced", overlap=overlap, bound=bound)
    assert bound.seconds <= bound.within(overlap) < found.seconds
    assert found.bound_share <= found.attainable_share < 1


def test_results_take_the_place_of_those_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = {"trace": "t", "rows": 3, "order": "input", "seconds": 2.123456}
    keep(path, "all", [first, first | {"order": "packed", "seconds": 1.0}])
    keep(path, "some", [first])
    keep(path, "all", [first | {"seconds": 4.0}])
    kept = json.loads(path.read_text())
    assert kept["overlap_some"] == [first | {"seconds": 2.1235}]
    assert {each["order"]: each["seconds"] for each in kept["overlap_all"]} == {
        "packed": 1.0,
        "input": 4.0,
    }
