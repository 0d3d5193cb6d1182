"""Who gets which prompts, and what becomes of those whose replica died."""

import random

import pytest
from fakes import make_prompt

from batchmla.core import Prompt
from batchmla.jobs.replicas_backlog import MOST_STRIKES, Backlog, Load, Window, WindowSizes

SIZES = WindowSizes.of(max_num_seqs=16, kv_capacity_tokens=4000)


def prompts_of(count: int, length: int = 40, *, first: int = 0, group: int = 0) -> list[Prompt]:
    """They begin with 34 tokens of their group."""
    head = [group + 1] * 34
    tail = length - 35
    return [make_prompt(first + n, [*head, 500 + n, *([7] * tail)]) for n in range(count)]


def end(backlog: Backlog, load: Load, window: Window) -> None:
    for prompt in window.prompts:
        backlog.end(load, prompt)


def test_a_replica_holds_what_it_runs_and_a_window_more() -> None:
    backlog = Backlog(SIZES)
    load = backlog.open_load()
    backlog.add(prompts_of(100))
    taken = []
    while (window := backlog.take(load)) is not None:
        taken.append(window)
    assert load.rows == sum(len(each.prompts) for each in taken) == 20
    assert [each.index for window in taken for each in window.prompts] == list(range(20))
    assert backlog.waiting_rows == 80
    end(backlog, load, taken[0])
    assert backlog.take(load) is not None


def test_long_prompts_count_by_their_tokens() -> None:
    backlog = Backlog(SIZES)
    load = backlog.open_load()
    backlog.add(prompts_of(20, length=1500))
    count = 0
    while backlog.take(load) is not None:
        count += 1
    assert (count, load.rows) == (2, 2)  # of 4,500 tokens
    load = backlog.open_load()
    backlog.add([make_prompt(99, [1] * 9000)])
    windows = [backlog.take(load) for _ in range(3)]
    assert windows[0] is not None and windows[2] is None


def test_the_end_is_shared_in_small_windows() -> None:
    backlog = Backlog(SIZES)
    one, other = backlog.open_load(), backlog.open_load()
    backlog.add(prompts_of(6))
    sizes = []
    while (window := backlog.take(one if len(sizes) % 2 == 0 else other)) is not None:
        sizes.append(len(window.prompts))
    assert sum(sizes) == 6 and max(sizes) == 2


def test_prompts_that_begin_alike_stay_on_one_replica_unless_another_is_idle() -> None:
    backlog = Backlog(SIZES)
    one, other = backlog.open_load(), backlog.open_load()
    groups = [prompts_of(40, first=100 * n, group=n) for n in range(2)]
    for start in range(0, 40, 4):
        for group in groups:
            backlog.add(group[start : start + 4])
    had: dict[int, list[int]] = {id(one): [], id(other): []}
    held: list[tuple[Load, Window]] = []
    dice = random.Random(0)
    while backlog.waiting_rows:
        load = dice.choice((one, other))
        window = backlog.take(load)
        if window is not None:
            had[id(load)] += [prompt.index // 100 for prompt in window.prompts]
            held.append((load, window))
        if len(held) > 4:
            end(backlog, *held.pop(0))
    shares = [max(each.count(0), each.count(1)) / len(each) for each in had.values()]
    assert min(shares) > 0.7
    backlog.add(prompts_of(8, first=900, group=1))  # all alike: both take part
    for load, window in held:
        end(backlog, load, window)
    assert backlog.take(one) is not None and backlog.take(other) is not None


def test_what_was_given_back_comes_first_and_in_order() -> None:
    backlog = Backlog(SIZES)
    load = backlog.open_load()
    backlog.add(prompts_of(30))
    window = backlog.take(load)
    assert window is not None
    window.prompts = window.prompts[1:]  # the first one has ended
    backlog.end(load, make_prompt(0, [1] * 40))
    assert backlog.give_back(load, window, is_suspect=True) == []
    again = backlog.take(load)
    assert again is not None and [each.index for each in again.prompts] == [1, 2, 3]


class DyingReplicas:
    """Replicas that die as soon as they hold the row `poison`, played out to the end."""

    def __init__(self, backlog: Backlog, poison: set[int], dice: random.Random) -> None:
        self.backlog, self.poison, self.dice = backlog, poison, dice
        self.loads = [backlog.open_load() for _ in range(3)]
        self.held: dict[int, list[Window]] = {n: [] for n in range(3)}
        self.done: list[int] = []
        self.guilty: list[int] = []
        self.deaths = 0

    def play(self, num_rows: int, is_suspect: bool = True) -> None:
        while len(self.done) + len(self.guilty) < num_rows:
            n = self.dice.randrange(3)
            window = self.backlog.take(self.loads[n])
            if window is not None:
                self.held[n].append(window)
            elif self.held[n]:
                self._progress(n, is_suspect)
            assert self.deaths < 50

    def _progress(self, n: int, is_suspect: bool) -> None:
        if any(each.index in self.poison for w in self.held[n] for each in w.prompts):
            self.deaths += 1
            for window in self.held[n]:
                found = self.backlog.give_back(self.loads[n], window, is_suspect=is_suspect)
                self.guilty += [each.index for each in found]
            self.held[n] = []
            self.backlog.close_load(self.loads[n])
            self.loads[n] = self.backlog.open_load()
        else:
            window = self.held[n].pop(self.dice.randrange(len(self.held[n])))
            end(self.backlog, self.loads[n], window)
            self.done += [each.index for each in window.prompts]


@pytest.mark.parametrize("seed", range(5))
def test_only_the_row_that_kills_replicas_is_taken_for_guilty(seed: int) -> None:
    backlog = Backlog(SIZES)
    backlog.add(prompts_of(200))
    replicas = DyingReplicas(backlog, {17, 120}, random.Random(seed))
    replicas.play(200)
    assert sorted(replicas.guilty) == [17, 120]
    assert sorted(replicas.done) == [n for n in range(200) if n not in (17, 120)]
    assert replicas.deaths <= 2 * MOST_STRIKES
    assert backlog.waiting_rows == 0


def test_rows_on_nodes_that_are_lost_are_no_suspects() -> None:
    backlog = Backlog(SIZES)
    backlog.add(prompts_of(8))
    load = backlog.open_load()
    for _ in range(10):
        window = backlog.take(load)
        assert window is not None and not window.is_apart
        assert backlog.give_back(load, window, is_suspect=False) == []
    assert backlog.waiting_rows == 8
