"""Prompts arrive in another process as they were, with their rules."""

from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from fakes import make_prompt

from batchmla.core import Budget, SamplingParams
from batchmla.jobs.replicas_codec import PromptReader, write_prompts
from batchmla.jobs.sampling_rules import RuleMaker
from batchmla.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(str(files("batchmla.builtin") / "tally")))


def test_plain_fields_arrive_as_they_were(tokenizer: Tokenizer) -> None:
    budget = Budget(
        max_reasoning_tokens=5, start_ids=(3,), end_ids=(4,), forced_ids=(4,), is_open=True
    )
    params = SamplingParams(temperature=0.5, logit_bias=((5, 1.0),), budget=budget, logprobs=2)
    sent = [make_prompt(n, range(n, n + 9), params, sample=n, tools="[]") for n in range(3)]
    sent[1].expected_tokens = 77
    found = PromptReader(tokenizer).read(write_prompts(sent))
    for was, now in zip(sent, found, strict=True):
        assert np.array_equal(was.token_ids, now.token_ids) and now.token_ids.dtype == np.int32
        for field in fields(was):
            if field.name != "token_ids":
                assert getattr(was, field.name) == getattr(now, field.name)
    assert found[0].params is found[2].params, "one copy of what rows share"


def test_rules_about_text_are_made_again(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance")
    rules = RuleMaker(tokenizer)
    params = SamplingParams(
        stop=rules.stop(["total", "é"]),
        bans=rules.bans(["pens"]),
        grammar=rules.grammar({"regex": "[0-9]+"}),
    )
    data = write_prompts([make_prompt(n, [5, 6], params) for n in range(2)])
    assert len(data) < 2000, "no table of the tokenizer travels"
    one, other = (each.params for each in PromptReader(tokenizer).read(data))
    assert one.stop is other.stop and one.bans is other.bans
    assert one.stop is not None and one.bans is not None and one.grammar is not None
    ids = tokenizer.encode_plain("the total").tolist()
    was, now = params.stop.watch(), one.stop.watch()  # type: ignore[union-attr]
    assert [now.push(token) for token in ids] == [was.push(token) for token in ids]
    banned = one.bans.watch().banned_ids()
    assert np.array_equal(banned, params.bans.watch().banned_ids())  # type: ignore[union-attr]
    masks = np.zeros((2, -(-len(tokenizer) // 32)), np.int32)
    one.grammar.fill([one.grammar.start()], masks[:1])
    params.grammar.fill([params.grammar.start()], masks[1:])  # type: ignore[union-attr]
    assert masks.any() and np.array_equal(masks[0], masks[1])
