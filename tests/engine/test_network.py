"""Time of the exchange where ranks are on several machines, against the formula by hand."""

import pytest
from published import DEEPSEEK_R1

from batchmla import kernels
from batchmla.core import EngineOptions
from batchmla.engine.candidates import candidates
from batchmla.engine.exchange import CALL_S, exchange_of
from batchmla.engine.hardware import parse_hardware
from batchmla.engine.network import NETWORK_BYTES_PER_S, NETWORK_CALL_S, exchange_seconds
from batchmla.placement import Placement

EXCHANGE = exchange_of(DEEPSEEK_R1, kernels.load("reference"), itemsize=2)
ONE, TWO = parse_hardware("8xH200"), parse_hardware("2x8xH200")
LINK = 450e9


def seconds(placement: Placement, machine: object) -> float:
    return exchange_seconds(EXCHANGE, placement, 100, 20, machine)  # type: ignore[arg-type]


def test_two_machines_of_eight() -> None:
    assert (TWO.count, TWO.num_machines, TWO.words) == (16, 2, "2 x 8 x H200")
    assert TWO.shared_by(16).memory_bytes == ONE.memory_bytes, "a GPU each"


def test_on_one_machine_only_its_links_count() -> None:
    eight = Placement(tensor=8)
    assert seconds(eight, ONE) == EXCHANGE.seconds(eight, 100, 20, LINK)
    assert seconds(Placement(), TWO) == 0


def test_a_group_on_two_machines_pays_the_network_for_all() -> None:
    wide = Placement(tensor=16)
    nbytes = EXCHANGE.sent_bytes(wide, 100, 20)
    calls = round((EXCHANGE.seconds(wide, 100, 20, LINK) - nbytes / LINK) / CALL_S)
    expected = nbytes / NETWORK_BYTES_PER_S + calls * NETWORK_CALL_S
    assert calls > 100 and seconds(wide, TWO) == pytest.approx(expected)


def test_groups_within_machines_pay_it_for_what_leaves_the_group() -> None:
    groups, alone = Placement(tensor=8, attention_data=2, expert=16), Placement(tensor=8)
    near_s = EXCHANGE.seconds(alone, 100, 20, LINK)
    far_bytes = EXCHANGE.sent_bytes(groups, 100, 20) - EXCHANGE.sent_bytes(alone, 100, 20)
    assert far_bytes > 0
    found_s = seconds(groups, TWO)
    far_s = found_s - near_s - far_bytes / NETWORK_BYTES_PER_S
    assert far_s / NETWORK_CALL_S == pytest.approx(round(far_s / NETWORK_CALL_S), abs=1e-6)
    assert found_s < seconds(Placement(tensor=16), TWO)


def test_plans_for_two_machines_know_every_placement_of_sixteen() -> None:
    found = candidates(DEEPSEEK_R1, EngineOptions(model="r1"), TWO)
    sizes = {(each.placement.tensor, each.placement.attention_data) for each in found}
    assert {(16, 1), (8, 2), (1, 16)} <= sizes
    near, wide = (
        next(each.steady for each in found if each.placement == wanted)
        for wanted in (
            Placement(tensor=8, attention_data=2, expert=16), Placement(tensor=16, expert=16),
        )
    )  # fmt: skip
    assert near is not None and wide is not None and near.exchange_s < wide.exchange_s
