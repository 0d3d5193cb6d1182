"""Penalties, biases and bans on the logits themselves, by their definitions."""

import numpy as np
import pytest
import torch
from fakes import make_prompt

from batchmla.core import SamplingParams
from batchmla.engine.sampler import Sampler
from batchmla.engine.sequence import Sequence
from batchmla.kernels.cpu import sample as fast
from batchmla.text.bans import BannedWords, Vocabulary

VOCAB = 40


class Recorder:
    """A `SampleOp` that keeps the logits it is given."""

    def __init__(self) -> None:
        self.logits_NV = torch.empty(0)

    def __call__(self, logits_NV: torch.Tensor, **knobs: torch.Tensor) -> torch.Tensor:
        self.logits_NV = logits_NV.clone()
        return fast.sample(logits_NV, **knobs)


def sequence(index: int, token_ids: list[int], **params: object) -> Sequence:
    prompt = make_prompt(index, token_ids, SamplingParams(**params))  # type: ignore[arg-type]
    return Sequence(prompt, arrival=index, max_model_len=1000)


def test_frequency_and_presence_penalties_count_what_was_generated() -> None:
    sequences = [
        sequence(0, [1, 5, 5], temperature=0.0, frequency_penalty=0.7, presence_penalty=0.2),
        sequence(1, [2, 2], temperature=1.0),
        sequence(2, [0, 3], temperature=1.0, presence_penalty=-1.5, repetition_penalty=1.3),
        sequence(
            3, [0, 3], temperature=0.0, frequency_penalty=2.0, logit_bias=((4, 3.5), (5, -9.0))
        ),
    ]  # fmt: skip
    recorder = Recorder()
    sampler = Sampler(recorder, vocab_limit=VOCAB, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    for _ in range(100):
        plain_NV = torch.randn(4, VOCAB + 3, generator=generator) * 2
        draws = sampler.draw(plain_NV.clone(), sequences)
        for row, each in enumerate(sequences):
            params = each.prompt.params
            want = plain_NV[row, :VOCAB].double().numpy().copy()
            if params.repetition_penalty != 1.0:
                seen = np.unique(each.tokens.view)
                scaled = np.where(want > 0, want / 1.3, want * 1.3)
                want[seen] = scaled[seen]
            made = each.tokens.view[each.prompt_tokens :]
            counts = np.bincount(made, minlength=VOCAB)
            want -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            for token_id, bias in params.logit_bias:
                want[token_id] += bias
            np.testing.assert_allclose(recorder.logits_NV[row].numpy(), want, rtol=0, atol=2e-5)
            token_id = draws[row].token_id
            assert token_id is not None and token_id < VOCAB
            each.push(token_id, is_forced=False)
    assert len(set(sequences[0].tokens.view.tolist())) > 32, "more ids than the first table holds"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_fc_060_ids_that_only_pad_the_vocabulary_are_never_drawn_nor_listed(
    temperature: float,
) -> None:
    rows = [
        sequence(0, [1], temperature=temperature),
        sequence(1, [1], temperature=temperature, logprobs=5, logit_bias=((3, 1.0),)),
        sequence(2, [1], temperature=temperature, top_p=0.9),
    ]
    sampler = Sampler(fast.sample, vocab_limit=8, device=torch.device("cpu"))
    for step in range(50):
        logits_NV = torch.randn(3, 40, generator=torch.Generator().manual_seed(step))
        logits_NV[:, 8:] += 30
        for each, draw in zip(rows, sampler.draw(logits_NV, rows), strict=True):
            assert draw.token_id is not None and draw.token_id < 8
            each.push(draw.token_id, is_forced=False)
    extras = rows[1].extras
    assert extras is not None and extras.scores is not None
    scores = extras.scores.result(50)
    assert scores.token_ids.max() < 8
    likely = [np.exp(part).sum() for part in np.split(scores.values, scores.ends[:-1])]
    assert max(likely) <= 1 + 1e-6 and np.mean(likely) > 0.8, "shares among the real ids"


def test_extras_of_a_row_never_touch_its_neighbours() -> None:
    texts = [bytes([65 + n % 26]) for n in range(VOCAB)]
    bans = BannedWords(["AB", "C"], Vocabulary(texts))

    def rows() -> list[Sequence]:
        return [
            sequence(0, [1], temperature=1.0),
            sequence(1, [1], temperature=1.0, bans=bans, frequency_penalty=1.0, logprobs=2),
            sequence(2, [1], temperature=0.0),
            sequence(3, [1], temperature=0.7, top_k=3, logit_bias=((5, 50.0),)),
        ]

    def draws(picked: list[Sequence], logits_NV: torch.Tensor) -> list[int | None]:
        sampler = Sampler(fast.sample, vocab_limit=VOCAB, device=torch.device("cpu"))
        return [draw.token_id for draw in sampler.draw(logits_NV.clone(), picked)]

    logits_NV = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    together = draws(rows(), logits_NV)
    alone = [draws([rows()[n]], logits_NV[n : n + 1])[0] for n in range(4)]
    assert together == alone and together[3] == 5
    broken_NV = logits_NV.clone()
    broken_NV[1, 7] = torch.nan
    assert draws(rows(), broken_NV) == [alone[0], None, alone[2], alone[3]]
