"""Lanes of sequences and of borders: wanted, kept once, restored, the oldest overwritten."""

import random

from batchmla.kv.lanes import Lanes


def name(index: int) -> bytes:
    return index.to_bytes(16, "little")


def test_only_wanted_borders_are_kept() -> None:
    lanes = Lanes(3, 2)
    lane = lanes.take()
    lanes.keep(name(1), lane)
    assert lanes.take_copies() == [] and lanes.longest([name(1)]) == 0
    lanes.want(name(1))
    assert lanes.is_wanted(name(1))
    lanes.keep(name(1), lane)
    assert not lanes.is_wanted(name(1))
    ((source, kept),) = lanes.take_copies()
    assert source == lane and kept in (3, 4)
    assert lanes.longest([name(0), name(1), name(2)]) == 2
    lanes.want(name(1))
    assert not lanes.is_wanted(name(1)), "a kept border is not kept again"
    other = lanes.take()
    lanes.restore(name(1), other)
    assert lanes.take_copies() == [(kept, other)]
    lanes.forget([name(1), name(7)])
    assert lanes.longest([name(1)]) == 0


def test_lanes_without_snapshots_keep_nothing() -> None:
    lanes = Lanes(2, 0)
    assert not lanes.keeps_snapshots
    assert {lanes.take(), lanes.take()} == {0, 1}


def test_copies_in_order_carry_what_each_border_had() -> None:
    """Random use against contents that are followed by hand: the oldest border goes first."""
    source = random.Random(0)
    lanes, held = Lanes(4, 3), dict[int, object]()
    running, wanted_content = dict[int, object](), dict[bytes, object]()
    for step in range(3000):
        for lane in list(running):
            running[lane] = held[lane] = ("step", step, lane)
        if len(running) < 4 and source.random() < 0.5:
            lane = lanes.take()
            known = [border for border in wanted_content if lanes.longest([border])]
            assert len(known) <= 3
            if known:
                border = source.choice(known)
                lanes.restore(border, lane)
                running[lane] = wanted_content[border]
            else:
                running[lane] = held[lane] = ("new", step)
        for lane in list(running):
            border = name(source.randrange(12))
            if source.random() < 0.2:
                lanes.want(border)
                is_new = not lanes.longest([border])
                lanes.keep(border, lane)
                if is_new:
                    wanted_content[border] = running[lane]
            if source.random() < 0.2:
                lanes.give(lane)
                del running[lane]
        for origin, target in lanes.take_copies():
            held[target] = held[origin]
        for lane, content in running.items():
            assert held[lane] == content
