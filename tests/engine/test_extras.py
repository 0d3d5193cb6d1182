"""Stop strings, grammars, penalties and budgets in the engine, whatever happens on the way."""

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from fakes import FAKE_VOCAB, greedy_ids, make_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from watched import WatchedEngine, run

from batchmla.core import (
    Budget,
    Completion,
    FinishReason,
    GrammarState,
    Prompt,
    SamplingParams,
)
from batchmla.text.bans import BannedWords, Vocabulary
from batchmla.text.stops import StopStrings

ROOMY = {"num_pages": 400, "max_model_len": 96, "max_num_seqs": 16, "max_batched_tokens": 512}
TIGHT = [
    {"max_batched_tokens": 1},
    {"max_batched_tokens": 7},
    {"num_pages": 24, "page_tokens": 4},
    {"num_pages": 96, "page_tokens": 1, "max_batched_tokens": 19},
    {"prefix_caching": False, "max_num_seqs": 2},
]
TEXTS = [chr(33 + token_id).encode() for token_id in range(FAKE_VOCAB)]
STARTS, ENDS, MESSAGE = (91, 92), (90, 95), (80, 81)
VOCABULARY = Vocabulary(TEXTS)


def text_of(ids: Items[int]) -> str:
    return b"".join(TEXTS[token_id] for token_id in ids).decode()


def stop_at(*texts: str) -> StopStrings:
    return StopStrings.of(texts, TEXTS.__getitem__)


class Even:
    """A grammar: even ids only, complete at each multiple of three tokens, over after nine."""

    class State:
        fault = None
        sure_id = None

        def __init__(self) -> None:
            self.ids: list[int] = []

        @property
        def can_end(self) -> bool:
            return len(self.ids) % 3 == 0

        @property
        def is_over(self) -> bool:
            return len(self.ids) >= 9

        def push(self, token_id: int) -> None:
            assert token_id % 2 == 0 and not self.is_over
            self.ids.append(token_id)

    def start(self) -> GrammarState:
        return self.State()

    def fill(self, states: Items[GrammarState], masks_NW: npt.NDArray[np.int32]) -> None:
        masks_NW[: len(states)] = 0x55555555


def budget(most: int | None, *, is_open: bool = True, loops: int | None = None) -> Budget:
    return Budget(
        max_reasoning_tokens=most, start_ids=STARTS, end_ids=ENDS, forced_ids=(*MESSAGE, *ENDS),
        is_open=is_open, loop_repeats=loops,
    )  # fmt: skip


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | fields))  # type: ignore[arg-type]


def shown(found: dict[int, Completion]) -> list[tuple[object, ...]]:
    rows = (found[index] for index in sorted(found))
    return [
        (r.token_ids.tolist(), r.finish_reason, r.trimmed_bytes, r.forced_at, r.error) for r in rows
    ]


def test_a_stop_string_over_several_tokens_ends_the_row_and_leaves_nothing_of_itself() -> None:
    free = greedy_ids([1, 2, 3], 24)
    text = text_of(free)
    prompts = [
        make_prompt(place, [1, 2, 3], greedy(stop=stop_at(text[place : place + 3])))
        for place in range(20)
    ]
    found = run(WatchedEngine(**ROOMY), prompts)
    for place in range(20):
        first = text.find(text[place : place + 3])
        assert found[place].token_ids.tolist() == free[:first]
        assert found[place].finish_reason is FinishReason.STOP


def test_a_stop_string_that_does_not_come_changes_nothing() -> None:
    params = greedy(stop=stop_at("never this"))
    found = run(WatchedEngine(**ROOMY), [make_prompt(0, [1, 2, 3], params)])
    assert found[0].token_ids.tolist() == greedy_ids([1, 2, 3], 24)
    assert found[0].finish_reason is FinishReason.LENGTH


def test_an_undecided_match_is_settled_by_the_end_of_the_row() -> None:
    free = greedy_ids([1, 2, 3], 24)
    text = text_of(free)
    longer = text[3:8] + "~never"  # begins left of the match below and is never completed
    for most, reason in ((8, "max_tokens"), (24, "the text")):
        params = greedy(stop=stop_at(text[5:7], longer), max_tokens=most)
        found = run(WatchedEngine(**ROOMY), [make_prompt(0, [1, 2, 3], params)])[0]
        assert found.token_ids.tolist() == free[:5], reason
        assert found.finish_reason is FinishReason.STOP
    params = greedy(stop=stop_at(text[5:7], longer), stop_ids=frozenset({free[7]}))
    found = run(WatchedEngine(**ROOMY), [make_prompt(0, [1, 2, 3], params)])[0]
    assert found.token_ids.tolist() == free[:5]


def test_stop_strings_wait_for_min_tokens() -> None:
    free = greedy_ids([1, 2, 3], 24)
    text = text_of(free)
    params = greedy(stop=stop_at(text[2]), min_tokens=7)
    found = run(WatchedEngine(**ROOMY), [make_prompt(0, [1, 2, 3], params)])[0]
    again = text.find(text[2], 7)
    assert found.token_ids.tolist() == (free if again < 0 else free[:again])


def test_fc_054_stop_strings_apply_to_the_content_unless_asked() -> None:
    free = greedy_ids([1, 2, 3], 6)
    inside = text_of(free)[1:3]
    forced = [*free, *MESSAGE, *ENDS]
    after = greedy_ids([1, 2, 3, *forced], 14)
    rows = [
        greedy(stop=stop_at(inside), budget=budget(6)),
        greedy(stop=stop_at(inside), budget=budget(6), stops_in_reasoning=True),
        greedy(stop=stop_at(text_of(after)[2:4]), budget=budget(6)),
        greedy(stop=stop_at(text_of([*MESSAGE, *ENDS])), budget=budget(6), stops_in_reasoning=True),
    ]
    found = run(
        WatchedEngine(**ROOMY), [make_prompt(i, [1, 2, 3], each) for i, each in enumerate(rows)]
    )
    assert found[0].token_ids.tolist() == [*forced, *after]
    assert found[1].token_ids.tolist() == free[:1] and found[1].forced_at is None
    first = text_of(after).find(text_of(after)[2:4])
    assert found[2].token_ids.tolist() == [*forced, *after[:first]] and found[2].forced_at == 6
    assert found[3].token_ids.tolist()[:10] == forced, "forced tokens are not searched"


def test_fc_090_a_grammar_begins_after_the_reasoning_and_ends_the_row() -> None:
    rows = [
        greedy(grammar=Even()),
        greedy(grammar=Even(), budget=budget(4)),
        greedy(grammar=Even(), budget=budget(4, is_open=False)),
        greedy(grammar=Even(), budget=budget(None), max_tokens=30),
        greedy(grammar=Even(), max_tokens=5),
    ]
    found = run(
        WatchedEngine(**ROOMY), [make_prompt(i, [1, 2, 3], each) for i, each in enumerate(rows)]
    )
    ids = [found[index].token_ids.tolist() for index in range(5)]
    assert len(ids[0]) == 9 and all(token_id % 2 == 0 for token_id in ids[0])
    assert found[0].finish_reason is FinishReason.STOP
    free = greedy_ids([1, 2, 3], 4)
    assert ids[1][:8] == [*free, *MESSAGE, *ENDS] and len(ids[1]) == 17
    assert all(token_id % 2 == 0 for token_id in ids[1][8:])
    opens = ids[2][:2] == list(STARTS)
    assert opens or (len(ids[2]) == 9 and all(token_id % 2 == 0 for token_id in ids[2]))
    assert ids[3] == greedy_ids([1, 2, 3], 30), "an endless reasoning is free"
    assert found[4].finish_reason is FinishReason.LENGTH and len(ids[4]) == 5


def test_a_grammar_ends_at_a_stop_id_only_where_the_content_is_complete() -> None:
    stops = frozenset(range(0, 97, 2))  # everything that the grammar lets follow
    params = greedy(grammar=Even(), stop_ids=stops, min_tokens=0)
    found = run(WatchedEngine(**ROOMY), [make_prompt(0, [1, 2, 3], params)])[0]
    assert found.token_ids.tolist() == [] and found.error is None, "it may end at once"
    nothing_left = greedy(grammar=Even(), stop_ids=stops, min_tokens=3)
    found = run(WatchedEngine(**ROOMY), [make_prompt(7, [1, 2, 3], nothing_left)])[7]
    assert found.error == "sampling.structured leaves no token to draw at position 3"


def test_a_model_may_open_its_reasoning_before_the_grammar() -> None:
    wish = ((91, 100.0), (92, 99.0))
    params = greedy(grammar=Even(), budget=budget(3, is_open=False), logit_bias=wish)
    found = run(WatchedEngine(**ROOMY), [make_prompt(0, [1, 2, 3], params)])[0]
    ids = found.token_ids.tolist()
    assert ids[:2] == [91, 92], "the rest of a marker must follow its beginning"
    assert ids[5:9] == [*MESSAGE, *ENDS] and found.forced_at == 5
    assert len(ids) == 18 and all(token_id % 2 == 0 for token_id in ids[9:])


def test_banned_words_do_not_come_and_all_of_them_are_a_fault_of_the_row() -> None:
    free = text_of(greedy_ids([1, 2, 3], 24))
    words = [free[0:2], free[5], free[7:10]]
    letters = [chr(33 + token_id) for token_id in range(FAKE_VOCAB)]
    prompts = [
        make_prompt(0, [1, 2, 3], greedy(bans=BannedWords(words, VOCABULARY))),
        make_prompt(1, [1, 2, 3], greedy(bans=BannedWords(letters, VOCABULARY))),
        make_prompt(2, [1, 2, 3], greedy()),
    ]
    found = run(WatchedEngine(**ROOMY), prompts)
    text = text_of(found[0].token_ids.tolist())
    assert len(text) == 24 and not any(word in text for word in words)
    assert text[0] == free[0] and text[1] != free[1]
    assert found[1].error == "sampling.bad_words leaves no token to draw at position 3"
    assert text_of(found[2].token_ids.tolist()) == free


def test_fc_083_the_loop_guard_ends_the_reasoning_at_its_last_repetition() -> None:
    rows = [
        greedy(budget=budget(None, loops=4), logit_bias=((7, 100.0),)),
        greedy(budget=budget(3, loops=4), logit_bias=((7, 100.0),)),
        greedy(budget=budget(None, loops=30), logit_bias=((7, 100.0),)),
    ]
    found = run(
        WatchedEngine(**ROOMY), [make_prompt(i, [1, 2, 3], each) for i, each in enumerate(rows)]
    )
    end = [*MESSAGE, *ENDS]
    assert found[0].token_ids.tolist()[:8] == [7, 7, 7, 7, *end] and found[0].has_looped
    assert found[1].token_ids.tolist()[:7] == [7, 7, 7, *end] and not found[1].has_looped
    assert found[2].token_ids.tolist() == [7] * 24 and found[2].forced_at is None


def drawn_params(draw: st.DrawFn) -> SamplingParams:
    most = draw(st.integers(0, 9))
    is_open = draw(st.booleans())
    bias = ((91, 100.0), (92, 50.0)) if not is_open and draw(st.booleans()) else ()
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 2.0])),
        top_k=draw(st.sampled_from([0, 5])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, -0.5])),
        logit_bias=bias,
        bans=draw(st.sampled_from([None, BannedWords(["ab", "X"], VOCABULARY)])),
        grammar=draw(st.sampled_from([None, Even()])),
        stop=draw(st.sampled_from([None, stop_at("A", "bcd")])),
        stops_in_reasoning=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 2])),
        min_tokens=draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(1, 26)),
        stop_ids=frozenset(draw(st.sets(st.integers(0, 96), max_size=2))),
        budget=budget(most, is_open=is_open, loops=draw(st.sampled_from([None, 2]))),
    )


@st.composite
def rows(draw: st.DrawFn) -> list[Prompt]:
    count = draw(st.integers(2, 7))
    return [
        make_prompt(i, [i, 3, 4, 5, 6, 7, 8, 9][: 2 + i], drawn_params(draw), expected_tokens=1)
        for i in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(prompts=rows(), change=st.sampled_from(TIGHT))
def test_budgets_are_exact_under_every_setting_and_engine(
    prompts: list[Prompt], change: dict[str, int]
) -> None:
    """Reasoning never exceeds its budget, equals it when the budget ended it, and nothing depends
    on chunks, pages or preemption."""
    found = run(WatchedEngine(**ROOMY), prompts)
    assert shown(run(WatchedEngine(**{**ROOMY, **change}), prompts)) == shown(found)
    for prompt in prompts:
        completion = found[prompt.index]
        if completion.error is None:
            check_budget(prompt, completion)


def check_budget(prompt: Prompt, completion: Completion) -> None:
    rule = prompt.params.budget
    assert rule is not None
    ids = completion.token_ids.tolist()
    begin = 0 if rule.is_open else place_of(ids, STARTS, 0)
    if begin is None:
        assert completion.forced_at is None
        return
    if not rule.is_open or (tuple(ids[:2]) == STARTS and completion.forced_at not in (0, 1)):
        begin += len(STARTS)
    end = place_of(ids, ENDS, begin)
    most = rule.max_reasoning_tokens
    assert most is not None
    if completion.forced_at is None:
        assert (len(ids) if end is None else end) - begin <= most
        return
    spent = completion.forced_at - begin
    assert spent == most or (completion.has_looped and spent < most)
    tail = tuple(ids[completion.forced_at : completion.forced_at + 4])
    assert tail == rule.forced_ids[: len(tail)]
    assert end is None or end >= completion.forced_at + 1
    if prompt.params.grammar is not None:
        assert all(token_id % 2 == 0 for token_id in ids[completion.forced_at + 4 :])
    if completion.logprobs is not None:
        assert len(completion.logprobs.ends) == len(ids)


def place_of(ids: list[int], marker: tuple[int, ...], start: int) -> int | None:
    places = range(start, len(ids) - len(marker) + 1)
    return next((at for at in places if tuple(ids[at : at + len(marker)]) == marker), None)


@pytest.mark.parametrize("most", [0, 1, 2, 7])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("extra", ["none", "penalties", "logprobs", "grammar", "stop", "bans"])
def test_fc_075_076_an_endless_thinker_is_stopped_after_exactly_so_many(
    most: int, sampled: bool, extra: str
) -> None:
    asked: dict[str, object] = {
        "none": {},
        "penalties": {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
        "logprobs": {"logprobs": 1, "prompt_logprobs": 0},
        "grammar": {"grammar": Even()},
        "stop": {"stop": stop_at("no such text")},
        "bans": {"bans": BannedWords(["Q"], VOCABULARY)},
    }[extra]  # type: ignore[assignment]
    never_ends = ((90, -100.0),)
    params = replace(
        greedy(budget=budget(most), logit_bias=never_ends, **asked),
        temperature=1.5 if sampled else 0.0,
    )
    engine = WatchedEngine(**ROOMY, every_row=True)
    found = run(engine, [make_prompt(0, [1, 2, 3], params)])[0]
    ids = found.token_ids.tolist()
    assert found.forced_at == most and ids[most : most + 4] == [*MESSAGE, *ENDS]
    assert 90 not in ids[:most]
    assert len(ids) == (most + 4 + 9 if extra == "grammar" else 24)
