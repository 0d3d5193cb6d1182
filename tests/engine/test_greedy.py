"""Rows that all take their largest logit: drawn in one pass, as they would be among others."""

from typing import Any

import numpy as np
import pytest
import torch
from fakes import make_prompt

from batchmla import kernels
from batchmla.core import Budget, SamplingParams
from batchmla.engine import sampler as samplers
from batchmla.engine.sampler import Draw, Sampler
from batchmla.engine.sequence import Sequence
from batchmla.kernels.cpu.sample import sample

BUDGET = Budget(
    max_reasoning_tokens=0, start_ids=(9,), end_ids=(6,), forced_ids=(4, 6), is_open=True
)
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0.0},),
    "greedy and forced": ({"temperature": 0.0}, {"temperature": 0.0, "budget": BUDGET}),
    "stops wait": (
        {"temperature": 0.0},
        {"temperature": 0.0, "min_tokens": 1, "stop_ids": frozenset(range(40))},
    ),
    "greedy and drawn": ({"temperature": 0.0}, {"temperature": 1.0}),
    "greedy and penalised": (
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ),
    "greedy and told": ({"temperature": 0.0}, {"temperature": 0.0, "logprobs": 2}),
}
VALUES = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0, 1e-45, 2.0, 2.0, -2.0], np.float32
)


def sequences(kind: str, count: int) -> list[Sequence]:
    cases = KINDS[kind]
    return [
        Sequence(
            make_prompt(index, [1, 2, 3], SamplingParams(**cases[index % len(cases)])),
            arrival=index,
            max_model_len=100,
        )
        for index in range(count)
    ]


def logits_of(count: int, vocab: int, seed: int) -> torch.Tensor:
    """Rows of sound numbers, rows with many equal ones, and rows with a few of `VALUES`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, vocab)).astype(np.float32)
    logits[1::4] = logits[1::4].round()
    for row in range(2, count, 4):
        places = rng.integers(0, vocab, rng.integers(1, 4))
        logits[row, places] = rng.choice(VALUES, len(places))
    logits[3::4] = rng.choice(VALUES[4:], (len(logits[3::4]), vocab))
    return torch.from_numpy(logits)


@pytest.mark.parametrize("vocab_limit", [1, 15, 50, 257])
@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_draws_what_is_drawn_among_others(
    kind: str, vocab_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of ids that only pad them are never finite here."""
    ops, faults = kernels.load("cpu"), 0
    for seed in range(12):
        padding = torch.tensor([torch.inf, torch.nan, 3e38]).expand(17, -1)
        logits_NV = torch.cat((logits_of(17, vocab_limit, seed), padding), dim=1)
        found: list[list[Draw]] = []
        for best, is_plain in ((ops.best, samplers._is_plain), (ops.best, lambda _: False)):
            with monkeypatch.context() as patch:
                patch.setattr(samplers, "_is_plain", is_plain)
                one = Sampler(
                    sample, best=best, vocab_limit=vocab_limit, device=torch.device("cpu")
                )
                found.append(one.draw(logits_NV.clone(), sequences(kind, 17)))
        torch_only = Sampler(sample, vocab_limit=vocab_limit, device=torch.device("cpu"))
        found.append(torch_only.draw(logits_NV.clone(), sequences(kind, 17)))
        assert found[0] == found[1] == found[2]
        faults += sum(draw.token_id is None for draw in found[0])
        assert all((draw.token_id or 0) < vocab_limit or draw.is_forced for draw in found[0])
    assert 12 < faults < 12 * 17 / 2


def test_forced_tokens_come_in_one_pass_too() -> None:
    rows = sequences("greedy and forced", 4)
    one = Sampler(sample, best=kernels.load("cpu").best, vocab_limit=50, device=torch.device("cpu"))
    draws = one.draw(logits_of(4, 50, 0)[:1].expand(4, -1).clone(), rows)
    assert [draw.is_forced for draw in draws] == [False, True, False, True]
    assert draws[1].token_id == 4 and draws[0].token_id == draws[2].token_id
