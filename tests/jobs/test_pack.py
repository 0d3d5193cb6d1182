"""The packer's window, its order, and the lengths it learns."""

import threading
import time

import numpy as np
import pytest

from batchmla.core import Budget, Completion, FinishReason, Prompt, SamplingParams
from batchmla.jobs.channel import Channel, Closed
from batchmla.jobs.estimate import LengthEstimate
from batchmla.jobs.pack import Packer, Stopped
from batchmla.jobs.pack_twins import Waiting


def prompt(index: int, ids: list[int], **params: object) -> Prompt:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    token_ids = np.array(ids, dtype=np.int32)
    return Prompt(row_id=f"d{index}", index=index, params=sampling, token_ids=token_ids)


def completion(index: int, num_tokens: int = 5) -> Completion:
    ids = np.zeros(num_tokens, dtype=np.int32)
    return Completion(
        row_id=f"d{index}", index=index, token_ids=ids, finish_reason=FinishReason.STOP,
        prompt_tokens=1,
    )  # fmt: skip


def packer_with(prompts: list[Prompt], *, window_rows: int = 1000, order: str = "auto") -> Packer:
    packer = Packer(order=order, window_rows=window_rows)  # type: ignore[arg-type]
    for each in prompts:
        packer.put([Waiting(each, 0, each.index)])
    return packer


def test_input_order_is_kept_when_asked_for() -> None:
    packer = packer_with([prompt(i, [9 - i] * (i + 1)) for i in range(9)], order="input")
    assert [each.index for each in packer.take(100, wait=False)] == list(range(9))


def test_take_gives_every_prompt_once_and_then_nothing() -> None:
    packer = packer_with([prompt(i, [i % 7, i]) for i in range(100)])
    packer.end()
    seen = []
    while taken := packer.take(7, wait=True):
        assert len(taken) <= 7
        seen.extend(each.index for each in taken)
    assert sorted(seen) == list(range(100)) and packer.take(7, wait=False) == []


def test_nothing_ready_is_empty_without_waiting() -> None:
    assert Packer(order="auto", window_rows=5).take(3, wait=False) == []


def put_all(packer: Packer, prompts: list[Prompt], put: list[int]) -> threading.Thread:
    def run() -> None:
        for each in prompts:
            packer.put([Waiting(each, 0, each.index)])
            put.append(each.index)
        packer.end()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def settle(put: list[int]) -> int:
    """How many were put once the reader waits."""
    before = -1
    while before != len(put):
        before = len(put)
        time.sleep(0.05)
    return before


def test_the_window_reaches_so_far_ahead_of_the_oldest_unfinished_row() -> None:
    packer, put = Packer(order="input", window_rows=16), list[int]()
    thread = put_all(packer, [prompt(i, [i]) for i in range(60)], put)
    assert settle(put) == 16
    taken = packer.take(16, wait=True)
    for each in taken[1:]:
        packer.finish([completion(each.index)])
    assert settle(put) == 16  # row 0 still runs
    packer.finish([completion(0)])
    assert settle(put) == 32
    while taken := packer.take(8, wait=True):
        for each in taken:
            packer.finish([completion(each.index)])
    thread.join(5)
    assert put == list(range(60))


def test_the_window_is_bounded_in_bytes_but_takes_any_one_prompt() -> None:
    packer, put = Packer(order="input", window_rows=1000, window_bytes=20_000), list[int]()
    thread = put_all(packer, [prompt(i, [1] * 2000) for i in range(10)], put)
    assert settle(put) == 2
    seen = 0
    while taken := packer.take(1, wait=True):
        seen += len(taken)
        packer.finish([completion(taken[0].index)])
    thread.join(5)
    assert seen == 10
    packer = Packer(order="input", window_rows=10, window_bytes=100)
    packer.put([Waiting(prompt(0, [1] * 2000), 0, 0)])
    assert len(packer.take(1, wait=False)) == 1


def test_stopping_lets_both_sides_go() -> None:
    packer = packer_with([prompt(0, [1])], window_rows=1)
    failed: list[BaseException] = []

    def put() -> None:
        try:
            packer.put([Waiting(prompt(1, [1]), 0, 1)])
        except Stopped as error:
            failed.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    packer.stop()
    thread.join(5)
    assert failed and packer.take(5, wait=True) == () and not packer.has_prompt()


def test_a_stop_without_a_notice_ends_the_wait() -> None:
    flag = threading.Event()
    packer = Packer(order="auto", window_rows=5, is_stopping=flag.is_set)
    threading.Timer(0.05, flag.set).start()
    assert packer.take(5, wait=True) == ()


def test_has_prompt_says_whether_one_will_come() -> None:
    packer = Packer(order="auto", window_rows=5)
    threading.Timer(0.05, packer.end).start()
    assert not packer.has_prompt()
    assert packer_with([prompt(0, [1])]).has_prompt()


def test_expected_lengths_are_bounded_and_learned() -> None:
    estimate = LengthEstimate()
    ends = frozenset((3,))
    bounded = SamplingParams(max_tokens=20, stop_ids=ends)
    free = SamplingParams(min_tokens=3)
    budget = Budget(
        max_reasoning_tokens=1000, start_ids=(1,), end_ids=(2,), forced_ids=(2,), is_open=True
    )
    assert estimate.expected(bounded) == 20
    assert estimate.expected(SamplingParams(budget=budget)) == 1000 + estimate.expected(free)
    for _ in range(200):
        estimate.add(100)
    assert 100 <= estimate.expected(free) < 125
    assert estimate.expected(bounded) == 20
    for _ in range(20_000):
        estimate.add(1)
    assert estimate.expected(free) == 3


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 8, 63, 100, 257, 4096, 100_000])
def test_an_estimate_is_at_least_the_length_and_at_most_a_quarter_more(num_tokens: int) -> None:
    estimate = LengthEstimate()
    estimate.add(num_tokens)
    assert num_tokens <= estimate.expected(SamplingParams()) <= num_tokens * 1.25 + 1


def test_a_channel_is_bounded_and_ends() -> None:
    channel: Channel[int] = Channel(100)
    channel.put(1, 90)
    channel.put(2, 90)  # over the bound: the next one waits
    put = threading.Thread(target=channel.put, args=(3, 1))
    put.start()
    time.sleep(0.05)
    assert put.is_alive()
    assert channel.get_all(0) == [1, 2]
    put.join(5)
    channel.end()
    assert channel.get_all(0) == [3] and channel.get_all(0) is None
    channel.close()
    with pytest.raises(Closed):
        channel.put(4, 1)


def test_a_hurry_wakes_the_reader_of_a_channel() -> None:
    channel: Channel[int] = Channel(1000)
    channel.hurry()  # of nothing
    channel.put(1, 1)
    channel.hurry()
    began_s = time.monotonic()
    assert channel.get_all(30.0) == [1] and time.monotonic() - began_s < 5
    waiting = threading.Timer(0.05, lambda: (channel.put(2, 1), channel.hurry()))
    waiting.start()
    assert channel.get_all(30.0) == [2] and time.monotonic() - began_s < 10


def test_many_prompts_at_once_are_put_as_one_by_one() -> None:
    prompts = [Waiting(prompt(i, [i] * (1 + i % 5)), 0, i) for i in range(200)]
    alone, together = (Packer(order="input", window_rows=1000) for _ in range(2))
    for each in prompts:
        alone.put([each])
    together.put(prompts)
    together.put([])
    for packer in (alone, together):
        packer.end()
    while taken := alone.take(7, wait=True):
        assert [each.index for each in taken] == [
            each.index for each in together.take(7, wait=True)
        ]
        done = [completion(each.index) for each in taken]
        assert alone.finish(done) == together.finish(done)
        assert alone.finish([]) == []
    assert not together.take(7, wait=True)


def test_a_batch_beyond_the_window_goes_in_as_room_comes() -> None:
    packer = Packer(order="input", window_rows=8, window_bytes=3000)
    batch = [Waiting(prompt(i, [i] * 50), 0, i) for i in range(40)]
    thread = threading.Thread(target=lambda: (packer.put(batch), packer.end()), daemon=True)
    thread.start()
    seen: list[int] = []
    while taken := packer.take(3, wait=True):
        seen += [each.index for each in taken]
        packer.finish([completion(each.index) for each in taken])
    thread.join(5)
    assert seen == list(range(40))


def dedupe(prompts: list[Prompt]) -> tuple[Packer, list[int]]:
    """A packer with these prompts, and which of them reach the engine."""
    packer = Packer(order="input", window_rows=1000, dedupe=True)
    packer.put([Waiting(each, 0, each.index) for each in prompts])
    return packer, [each.index for each in packer.take(100, wait=False)]


def test_equal_greedy_prompts_run_once_and_every_row_gets_the_completion() -> None:
    greedy = {"temperature": 0.0, "max_tokens": 9}
    prompts = [prompt(i, [i % 3, 5, 6], **greedy) for i in range(9)]
    packer, run = dedupe(prompts)
    assert run == [0, 1, 2]
    assert prompts[3].token_ids is prompts[0].token_ids
    found = packer.finish([completion(1, 7), completion(0, 4)])
    assert sorted((w.prompt.index, c.index, len(c.token_ids)) for w, c in found) == [
        (0, 0, 4), (1, 1, 7), (3, 3, 4), (4, 4, 7), (6, 6, 4), (7, 7, 7),
    ]  # fmt: skip
    assert [c.row_id for w, c in found] == [w.prompt.row_id for w, c in found]
    assert packer.num_twins == 4
    packer.put([Waiting(prompt(9, [0, 5, 6], **greedy), 0, 9)])
    assert [each.index for each in packer.take(9, wait=False)] == [9], "row 0 has ended"


def test_prompts_that_differ_in_anything_run_by_themselves() -> None:
    same = [1, 2, 3]
    prompts = [
        prompt(0, same, temperature=0.0),
        prompt(1, [1, 2], temperature=0.0),
        prompt(2, same, temperature=0.0, max_tokens=5),
        prompt(3, same, temperature=0.5),
        prompt(4, same, temperature=0.5),
        prompt(5, same, temperature=0.0, repetition_penalty=1.1),
    ]
    assert dedupe(prompts)[1] == [0, 1, 2, 3, 4, 5]
    packer = Packer(order="input", window_rows=1000)
    packer.put([Waiting(prompt(i, same, temperature=0.0), 0, i) for i in range(3)])
    assert len(packer.take(9, wait=False)) == 3, "nothing is left out unless asked for"


def test_a_failure_names_the_row_that_it_is_of() -> None:
    prompts = [prompt(i, [1, 2], temperature=0.0) for i in range(2)]
    packer, _ = dedupe(prompts)
    failed = Completion(
        row_id="d0", index=0, token_ids=np.zeros(0, np.int32), finish_reason=FinishReason.ERROR,
        prompt_tokens=2, error="row d0: no logits",
    )  # fmt: skip
    assert [c.error for _, c in packer.finish([failed])] == [
        "row d0: no logits",
        "row d1: no logits",
    ]


def test_twins_hold_the_window_until_their_leader_ends() -> None:
    packer = Packer(order="input", window_rows=4, dedupe=True)
    put: list[int] = []
    thread = put_all(packer, [prompt(i, [1], temperature=0.0) for i in range(8)], put)
    assert settle(put) == 4
    (leader,) = packer.take(9, wait=True)
    packer.finish([completion(leader.index)])
    assert settle(put) == 8
    assert [each.index for each in packer.take(9, wait=True)] == [4]
    packer.finish([completion(4)])
    thread.join(5)
    assert packer.num_twins == 6 and packer.take(9, wait=True) == ()
