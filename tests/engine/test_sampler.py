"""Sampling: published Philox vectors, the right distribution, fast equal to plain, masks."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fakes import make_prompt

from batchmla.core import SamplingParams
from batchmla.engine.sampler import Sampler
from batchmla.engine.sequence import Sequence
from batchmla.kernels.cpu import sample as fast
from batchmla.kernels.reference import sample as plain

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip
Settings = dict[str, float]
SAMPLES: dict[str, Callable[..., torch.Tensor]] = {"cpu": fast.sample, "reference": plain.sample}


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, want: str) -> None:
    assert plain.philox(words(counter), words(key)) == words(want)  # type: ignore[arg-type]
    got = fast.philox(
        tuple(np.array([word], np.uint64) for word in words(counter)),  # type: ignore[arg-type]
        tuple(np.array([word], np.uint64) for word in words(key)),  # type: ignore[arg-type]
    )
    assert tuple(int(word[0]) for word in got) == words(want)


def test_uniform_is_the_same_in_both_and_in_range() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, 500, dtype=np.uint64)
    positions = np.concatenate((np.arange(498), [2**31, 2**33 + 5]))
    got = fast.uniform(keys, positions)
    want = [plain.uniform(int(k), int(p)) for k, p in zip(keys, positions, strict=True)]
    assert got.tolist() == want
    assert 0 <= min(want) < 0.02 and 0.98 < max(want) < 1


def call(
    sample: Callable[..., torch.Tensor],
    logits_NV: torch.Tensor,
    uniform: np.ndarray,
    **settings: float,
) -> torch.Tensor:
    num_rows = len(logits_NV)

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), settings.get(name, default), dtype=dtype)

    return sample(
        logits_NV,
        temperature_N=column("temperature", 1.0, torch.float64),
        top_k_N=column("top_k", 0, torch.int64),
        top_p_N=column("top_p", 1.0, torch.float64),
        min_p_N=column("min_p", 0.0, torch.float64),
        uniform_N=torch.from_numpy(uniform),
    )


def expected_shares(logits_V: torch.Tensor, settings: Settings) -> np.ndarray:
    """The distribution by its definition, float64."""
    logits = logits_V.double().numpy() / settings.get("temperature", 1.0)
    order = np.argsort(-logits, kind="stable")
    shares = np.exp(logits - logits.max())
    kept = np.zeros(len(logits), bool)
    kept[order[: int(settings.get("top_k", 0)) or None]] = True
    shares = np.where(kept, shares, 0) / shares[kept].sum()
    if settings.get("top_p", 1.0) < 1:
        before = np.cumsum(shares[order]) - shares[order]
        shares[order[before >= settings["top_p"]]] = 0
    shares[shares < settings.get("min_p", 0.0) * shares.max()] = 0
    return shares / shares.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6, "min_p": 0.05},
        {"temperature": 1.7, "top_k": 20},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 0.8},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(settings: Settings) -> None:
    num_draws, vocab = 200_000, 90
    generator = torch.Generator().manual_seed(3)
    logits_V = torch.randn(vocab, generator=generator) * 1.5
    keys = np.repeat(np.arange(50, dtype=np.uint64), num_draws // 50) * np.uint64(7919)
    numbers = fast.uniform(keys, np.tile(np.arange(num_draws // 50), 50))
    counts = np.zeros(vocab)
    for part in range(0, num_draws, 20_000):
        rows = slice(part, part + 20_000)
        logits_NV = logits_V.expand(20_000, vocab)
        drawn = call(fast.sample, logits_NV, numbers[rows], **settings)
        counts += np.bincount(drawn.numpy(), minlength=vocab)
    expected = expected_shares(logits_V, settings) * num_draws
    assert counts[expected == 0].sum() == 0, "a filtered id was drawn"
    often = expected >= 5
    rest = expected[~often].sum()
    observed, wanted = list(counts[often]), list(expected[often])
    if rest > 0:
        observed.append(counts[~often].sum())
        wanted.append(rest)
    freedom = len(wanted) - 1
    chi2 = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    # Wilson and Hilferty: the cube root of chi2 / freedom is nearly normal; 4 deviations are 3e-5.
    deviations = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(
        2 / (9 * freedom)
    )
    assert abs(deviations) < 4, f"chi2 {chi2:.0f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("vocab", [3, 97, 1500, 4099])
def test_fast_draws_what_the_specification_draws(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits_NV = (torch.randn(160, vocab, generator=generator) * 2).float()
    logits_NV[80:] = torch.round(logits_NV[80:])  # ties, at every border
    logits_NV[::7, : vocab // 3] = -torch.inf
    rng = np.random.default_rng(vocab)
    knobs = {
        "temperature_N": torch.from_numpy(rng.choice([0, 1e-6, 0.3, 1.0, 5.0], 160)),
        "top_k_N": torch.from_numpy(rng.choice([0, 1, 2, 63, 64, 65, 1024, 10**6], 160)),
        "top_p_N": torch.from_numpy(rng.choice([1e-9, 0.3, 0.95, 0.9999, 1.0], 160)),
        "min_p_N": torch.from_numpy(rng.choice([0, 0.0, 0.05, 1.0], 160)),
        "uniform_N": torch.from_numpy(rng.random(160)),
    }
    want = plain.sample(logits_NV, **knobs)
    got = fast.sample(logits_NV, **knobs)
    different = torch.nonzero(want != got).squeeze(1).tolist()
    # Rows without top-k and top-p sum float32 weights: a number within 1e-6 of a border may fall
    # on its other side. Nothing else may differ.
    for row in different:
        assert knobs["top_k_N"][row] == 0 and knobs["top_p_N"][row] == 1, row
    assert len(different) <= 1
    alone = [
        fast.sample(
            logits_NV[row : row + 1],
            **{name: values[row : row + 1] for name, values in knobs.items()},
        ).item()
        for row in range(160)
    ]
    assert got.tolist() == alone, "a row's draw depends on its neighbours"


@pytest.mark.parametrize("name", SAMPLES)
def test_greedy_takes_the_lowest_id_among_equals(name: str) -> None:
    logits_NV = torch.tensor([[0.0, 2.0, 2.0], [-torch.inf, -3.0, -3.0], [1.0, 1.0, 1.0]])
    got = call(SAMPLES[name], logits_NV, np.zeros(3), temperature=0.0)
    assert got.tolist() == [1, 1, 0]


def sequence(index: int, token_ids: list[int], **params: object) -> Sequence:
    prompt = make_prompt(index, token_ids, SamplingParams(**params))  # type: ignore[arg-type]
    return Sequence(prompt, arrival=index, max_model_len=1000)


def sampler(vocab_limit: int) -> Sampler:
    return Sampler(fast.sample, vocab_limit=vocab_limit, device=torch.device("cpu"))


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    sequences = [
        sequence(0, [1, 5, 5, 7], temperature=0.0, repetition_penalty=1.3),
        sequence(1, [2, 2], temperature=0.0),
        sequence(2, [0, 3, 8], temperature=0.0, repetition_penalty=0.7),
    ]
    chosen: list[int] = []
    recorded: list[torch.Tensor] = []

    def record(logits_NV: torch.Tensor, **_: object) -> torch.Tensor:
        recorded.append(logits_NV.clone())
        return torch.argmax(logits_NV, dim=1)

    watched = Sampler(record, vocab_limit=40, device=torch.device("cpu"))
    sequences.append(sequence(3, [4], temperature=1.0))  # so that the op is called
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        logits_NV = torch.randn(4, 40, generator=generator)
        plain_NV = logits_NV.clone()
        draws = watched.draw(logits_NV, sequences)
        for row, (each, draw) in enumerate(zip(sequences, draws, strict=True)):
            penalty = each.prompt.params.repetition_penalty
            ids = torch.from_numpy(each.tokens.view.astype(np.int64))[None]
            want = RepetitionPenaltyLogitsProcessor(penalty)(ids, plain_NV[row : row + 1].clone())
            torch.testing.assert_close(recorded[-1][row], want[0], rtol=0, atol=0)
            assert draw.token_id is not None
            each.push(draw.token_id, is_forced=False)
            chosen.append(draw.token_id)
        if len(chosen) == 12:
            watched.forget(sequences[0])  # as after a preemption
    assert len(set(chosen)) > 3


def test_stop_ids_wait_for_min_tokens_and_padding_ids_are_never_drawn() -> None:
    one = sequence(0, [1], temperature=0.0, min_tokens=2, stop_ids=frozenset({3, 900}))
    engine = sampler(vocab_limit=5)
    logits_V = torch.tensor([0.0, 1.0, 2.0, 9.0, 3.0, 50.0, torch.nan])
    ids = []
    for _ in range(3):
        (draw,) = engine.draw(logits_V[None].clone(), [one])
        assert draw.token_id is not None
        ids.append(draw.token_id)
        one.push(draw.token_id, is_forced=False)
    assert ids == [4, 4, 3]


def test_a_row_with_bad_logits_is_the_only_one_without_a_token() -> None:
    rows = [sequence(index, [index], temperature=1.0, top_p=0.9) for index in range(5)]
    logits_NV = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    want = [draw.token_id for draw in sampler(50).draw(logits_NV.clone(), rows)]
    logits_NV[1, 7], logits_NV[2, 3], logits_NV[4] = torch.nan, torch.inf, -torch.inf
    got = [draw.token_id for draw in sampler(50).draw(logits_NV, rows)]
    assert got == [want[0], None, None, want[3], None]


def test_large_finite_logits_are_not_bad() -> None:
    row = sequence(0, [1], temperature=0.0)
    logits_NV = torch.full((1, 8), 2e38)
    (draw,) = sampler(8).draw(logits_NV, [row])
    assert draw.token_id == 0


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("top_k", [0, 3, 10**30])
def test_extreme_penalties_and_top_k_draw_and_leave_neighbours_alone(
    penalty: float, top_k: int
) -> None:
    logits_NV = torch.tensor([[5.0, -5.0, 0.0, 1.0], [5.0, -5.0, 0.0, 1.0]])
    sampler = Sampler(fast.sample, vocab_limit=4, device=torch.device("cpu"))
    rows = [
        sequence(0, [0, 1, 2], temperature=1e-6, repetition_penalty=value, top_k=top_k)
        for value in (penalty, 1.0)
    ]
    drawn = [draw.token_id for draw in sampler.draw(logits_NV, rows)]
    assert drawn == [0 if penalty < 1 else 3, 0]
