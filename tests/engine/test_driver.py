"""Memory besides tensors, by hand and against what was reported of another program."""

import pytest

from batchmla.engine.driver import (
    CONTEXT_BYTES,
    TALKING_BYTES,
    connection_bytes,
    driver_bytes,
)
from batchmla.parallel import MAX_CHANNELS
from batchmla.placement import Placement

MIB = 2**20


def test_a_connection_is_one_large_and_one_small_buffer() -> None:
    """The two sizes that NCCL was reported to allocate: 10,485,760 and 2,097,152."""
    assert connection_bytes() == 10_485_760 + 2_097_152


def test_eight_gpus_that_exchange_in_all_channels_take_what_was_reported() -> None:
    """4.34 GB of each, of 8 H100 after their first exchange."""
    found = driver_bytes(Placement(attention_data=8), num_channels=32)
    assert found == pytest.approx(4.34e9, rel=0.005)


def test_connections_of_every_placement_by_hand() -> None:
    base = CONTEXT_BYTES + TALKING_BYTES
    one = MAX_CHANNELS * 12 * MIB
    switch = MAX_CHANNELS * 2 * MIB
    for tensor, groups, expected in (
        (1, 8, 7 * one), (8, 1, 2 * one + 8 * switch), (2, 1, one), (2, 4, 4 * one),
        (4, 2, 3 * one + 4 * switch), (1, 2, one),
    ):  # fmt: skip
        place = Placement(tensor=tensor, attention_data=groups)
        assert driver_bytes(place) == base + expected, place
    assert driver_bytes(Placement()) == CONTEXT_BYTES


def test_half_the_channels_take_half_the_buffers() -> None:
    place = Placement(attention_data=8)
    buffers = [driver_bytes(place, count) - driver_bytes(place, 0) for count in (16, 32)]
    assert buffers[1] == 2 * buffers[0] > 2.8e9
