"""What grammars allow, as bits on the logits, and tokens that follow without a forward pass."""

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fakes import FAKE_VOCAB, make_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from watched import WatchedEngine, run

from batchmla.core import Budget, Completion, GrammarState, Prompt, SamplingParams
from batchmla.engine.masks import forbidden_on, forbidden_on_host, make_masks
from batchmla.engine.sequence import Sequence
from batchmla.text.stops import StopStrings

ROOMY = {"num_pages": 400, "max_model_len": 96, "max_num_seqs": 16, "max_batched_tokens": 512}
TIGHT = [
    {},
    {"max_batched_tokens": 1},
    {"max_batched_tokens": 7},
    {"num_pages": 24, "page_tokens": 4},
    {"num_pages": 96, "page_tokens": 1, "max_batched_tokens": 19},
    {"prefix_caching": False, "max_num_seqs": 2},
]
TEXTS = [chr(33 + token_id).encode() for token_id in range(FAKE_VOCAB)]
ENDS, MESSAGE = (90, 95), (80, 81)


class Listed:
    """A grammar: place by place one of the ids listed for it; it tells what is sure if `is_told`.
    Complete at places in `ends`, over after the last place.
    """

    class State:
        fault = None

        def __init__(self, rule: "Listed") -> None:
            self.rule = rule
            self.place = 0

        @property
        def allowed(self) -> Items[int]:
            return () if self.is_over else self.rule.places[self.place]

        @property
        def can_end(self) -> bool:
            return self.place in self.rule.ends

        @property
        def is_over(self) -> bool:
            return self.place == len(self.rule.places)

        @property
        def sure_id(self) -> int | None:
            is_sure = self.rule.is_told and len(self.allowed) == 1 and not self.can_end
            return self.allowed[0] if is_sure else None

        def push(self, token_id: int) -> None:
            assert token_id in self.allowed, (self.place, token_id)
            self.place += 1

    def __init__(self, places: Items[Items[int]], ends: Items[int], *, is_told: bool) -> None:
        self.places, self.ends, self.is_told = places, ends, is_told

    def start(self) -> GrammarState:
        return self.State(self)

    def fill(self, states: Items[GrammarState], masks_NW: npt.NDArray[np.int32]) -> None:
        for state, mask_W in zip(states, masks_NW.view(np.uint32), strict=True):
            assert isinstance(state, self.State)
            mask_W[:] = 0
            for token_id in state.allowed:
                mask_W[token_id // 32] |= np.uint32(1 << token_id % 32)


def listed(*places: Items[int], ends: Items[int] = ()) -> Listed:
    return Listed(places, ends, is_told=True)


def untold(prompt: Prompt) -> Prompt:
    """The same row with a grammar that never says what is sure."""
    rule = prompt.params.grammar
    if not isinstance(rule, Listed):
        return prompt
    silent = Listed(rule.places, rule.ends, is_told=False)
    return replace(prompt, params=replace(prompt.params, grammar=silent))


def shown(found: dict[int, Completion]) -> list[tuple[object, ...]]:
    rows = (found[index] for index in sorted(found))
    return [
        (r.token_ids.tolist(), r.finish_reason, r.trimmed_bytes, r.forced_at, r.error) for r in rows
    ]


def steps_of(prompts: list[Prompt]) -> tuple[list[tuple[object, ...]], int]:
    engine = WatchedEngine(**{**ROOMY, "page_tokens": 64})
    return shown(run(engine, prompts)), engine.stats().steps


def test_sure_tokens_cost_no_step() -> None:
    places = [(5,), (7, 9), (11,), (13,), (15,), (2, 4), (6,)]
    prompt = make_prompt(0, [1, 2, 3], SamplingParams(temperature=0.0, grammar=listed(*places)))
    quick, num_quick = steps_of([prompt])
    slow, num_slow = steps_of([untold(prompt)])
    assert quick == slow and len(quick[0][0]) == 7  # type: ignore[arg-type]
    assert (num_quick, num_slow) == (3, 7)


def test_rows_whose_every_logit_is_wanted_take_every_step() -> None:
    rule = listed(*[(2 * n,) for n in range(12)])
    params = SamplingParams(temperature=0.0, grammar=rule, logprobs=1)
    engine = WatchedEngine(**ROOMY)
    found = run(engine, [make_prompt(0, [1, 2, 3], params)])[0]
    assert engine.stats().steps == 12
    assert found.logprobs is not None and len(found.logprobs.ends) == 12


def test_an_id_beyond_the_vocabulary_is_no_sure_token() -> None:
    beyond = FAKE_VOCAB + 1
    params = SamplingParams(temperature=0.0, grammar=listed((4,), (beyond,), (6,)))
    found = run(WatchedEngine(**ROOMY), [make_prompt(0, [1, 2, 3], params)])[0]
    assert found.error == "sampling.structured leaves no token to draw at position 4"


@st.composite
def grammars(draw: st.DrawFn) -> Listed:
    one = st.integers(0, 89).map(lambda token_id: (token_id,))
    several = st.lists(st.integers(0, 89), min_size=2, max_size=9, unique=True)
    places = draw(st.lists(st.one_of(one, one, one, several), min_size=1, max_size=20))
    return listed(*places, ends=draw(st.sets(st.integers(0, len(places)), max_size=2)))


@st.composite
def rows(draw: st.DrawFn) -> list[Prompt]:
    def params() -> SamplingParams:
        budget = Budget(
            max_reasoning_tokens=draw(st.integers(0, 4)), start_ids=(91, 92), end_ids=ENDS,
            forced_ids=(*MESSAGE, *ENDS), is_open=draw(st.booleans()),
        )  # fmt: skip
        return SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
            grammar=draw(st.one_of(grammars(), st.none())),
            stop=draw(st.sampled_from([None, StopStrings.of(["A", "bc"], TEXTS.__getitem__)])),
            logprobs=draw(st.sampled_from([None, None, 2])),
            min_tokens=draw(st.integers(0, 3)),
            max_tokens=draw(st.integers(1, 26)),
            stop_ids=frozenset(draw(st.sets(st.integers(0, 96), max_size=2))),
            budget=draw(st.sampled_from([None, budget])),
        )

    count = draw(st.integers(1, 6))
    return [
        make_prompt(i, [i, 3, 4, 5, 6, 7, 8, 9][: 2 + i], params(), expected_tokens=1)
        for i in range(count)
    ]


@settings(max_examples=80, deadline=None)
@given(prompts=rows(), change=st.sampled_from(TIGHT))
def test_what_is_sure_changes_no_row(prompts: list[Prompt], change: dict[str, int]) -> None:
    """Whatever the chunks, the pages and the preemptions."""
    found = run(WatchedEngine(**{**ROOMY, **change}), prompts)
    plain = run(WatchedEngine(**ROOMY), [untold(prompt) for prompt in prompts])
    assert shown(found) == shown(plain)


@pytest.mark.parametrize("vocab", [8, 32, 40, 97])
def test_the_logits_of_all_other_tokens_become_minus_infinity(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    sequences, allowed = [], []
    for index in range(5):
        ids = np.flatnonzero(generator.random(vocab) < 0.3).tolist() if index != 3 else []
        allowed.append({*ids, 5} if index == 4 else set(ids))
        rule = listed(ids, ends=(0,) if index == 4 else ())
        params = SamplingParams(grammar=rule, stop_ids=frozenset({5, vocab + 3}), min_tokens=0)
        prompt = make_prompt(index, [1, 2], params if index != 1 else SamplingParams())
        sequences.append(Sequence(prompt, arrival=index, max_model_len=99))
        if index != 4:
            allowed[-1].discard(5)  # a stop id, and the content is not complete
    for held in (range(5), (0, 2, 3, 4), (4,)):
        plain_NV = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1))
        logits_NV = plain_NV.clone()
        masks = make_masks(sequences, list(held), vocab)
        assert masks is not None and masks.rows == [row for row in held if row != 1]
        masks.apply(logits_NV)
        for row in range(5):
            kept = set(torch.isfinite(logits_NV[row]).nonzero()[:, 0].tolist())
            assert kept == (allowed[row] if row in masks.rows else set(range(vocab)))
            assert torch.equal(logits_NV[row, list(kept)], plain_NV[row, list(kept)])
        empty = [row for row in masks.rows if not allowed[row]]
        assert masks.empty_rows == empty and (3 not in held or 3 in empty)
    assert make_masks(sequences, [1], vocab) is None


@pytest.mark.parametrize("vocab", [5, 32, 97])
def test_devices_unpack_the_bits_as_the_host_does(vocab: int) -> None:
    words_RW = np.random.default_rng(3).integers(0, 2**32, (4, -(-vocab // 32)), np.uint32)
    places = torch.arange(vocab)
    words = torch.from_numpy(words_RW.astype(np.int64))
    want = (words[:, places // 32] >> (places % 32)) & 1 == 0
    assert torch.equal(forbidden_on_host(words_RW, vocab), want)
    assert torch.equal(forbidden_on(torch.device("cpu"), words_RW, vocab), want)
