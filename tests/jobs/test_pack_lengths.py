"""Lengths by kinds of prompts."""

import numpy as np

from batchmla.core import Completion, FinishReason, Prompt, SamplingParams
from batchmla.jobs.pack_lengths import ENOUGH_ROWS, MAX_KINDS, PromptLengths

FREE = SamplingParams(stop_ids=frozenset((1,)))


def prompt(kind: int, own_tokens: int = 10, params: SamplingParams = FREE) -> Prompt:
    ids = np.concatenate([np.full(80, kind), np.arange(own_tokens)]).astype(np.int32)
    return Prompt(row_id="r", index=0, params=params, token_ids=ids)


def completion(num_tokens: int, error: str | None = None) -> Completion:
    ids = np.zeros(num_tokens, np.int32)
    return Completion(
        row_id="r", index=0, token_ids=ids, finish_reason=FinishReason.STOP, prompt_tokens=1,
        error=error,
    )  # fmt: skip


def test_each_beginning_has_its_own_lengths() -> None:
    lengths = PromptLengths()
    for _ in range(ENOUGH_ROWS):
        lengths.learn(prompt(5), completion(20))
        lengths.learn(prompt(6), completion(900))
    assert 20 <= lengths.expected(prompt(5)) <= 25
    assert 900 <= lengths.expected(prompt(6)) <= 1125
    assert lengths.expected(prompt(7)) >= 900, "all rows count for a kind not seen yet"
    bounded = SamplingParams(max_tokens=100, stop_ids=frozenset((1,)))
    assert lengths.expected(prompt(6, params=bounded)) == 100


def test_long_prompts_of_a_beginning_are_told_from_short_ones_once_there_are_enough() -> None:
    lengths = PromptLengths()
    for _ in range(ENOUGH_ROWS - 1):
        lengths.learn(prompt(5, 10), completion(10))
        lengths.learn(prompt(5, 900), completion(300))
    assert lengths.expected(prompt(5, 10)) == lengths.expected(prompt(5, 900)) >= 300
    lengths.learn(prompt(5, 10), completion(10))
    assert lengths.expected(prompt(5, 10)) <= 12
    lengths.learn(prompt(5, 900), completion(300))
    assert lengths.expected(prompt(5, 900)) >= 300


def test_failures_teach_nothing_and_kinds_are_bounded() -> None:
    lengths = PromptLengths()
    before = lengths.expected(prompt(3))
    for _ in range(99):
        lengths.learn(prompt(3), completion(0, error="poison"))
    assert lengths.expected(prompt(3)) == before
    for kind in range(2 * MAX_KINDS):
        lengths.learn(prompt(kind), completion(5))
    assert len(lengths._kinds) == MAX_KINDS


def test_what_only_max_tokens_can_end_is_as_long_as_that() -> None:
    lengths = PromptLengths()
    for _ in range(99):
        lengths.learn(prompt(3), completion(20))
    assert lengths.expected(prompt(3, params=SamplingParams(max_tokens=700))) == 700
