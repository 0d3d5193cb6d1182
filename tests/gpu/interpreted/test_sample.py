"""Drawing in the interpreter: the reference's ids, whatever is filtered, however rows are cut."""

import pytest
import torch

from batchmla.kernels.reference.sample import sample as plain
from batchmla.kernels.triton.sample import Sizes, draw, sample
from batchmla.kernels.triton.sample_collect import Parameters

SMALL = Sizes(chunk=256, capacity=64)  # several chunks; more than 64 are searched in the row
ROWS = 3
FILTERS = {
    "plain": {},
    "min_p": {"temperature": 0.6, "min_p": 0.05},
    "top_k": {"temperature": 1.7, "top_k": 20},
    "top_k 1": {"top_k": 1},
    "top_p": {"temperature": 0.6, "top_p": 0.95},
    "wide top_p": {"temperature": 3.0, "top_p": 0.999},
    "narrow top_p": {"top_p": 1e-9},
    "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "top_k beyond": {"top_k": 5000, "min_p": 0.01},
    "many": {"temperature": 2.0, "top_k": 100, "top_p": 0.97},
}


def parameters(count: int, **given: float) -> Parameters:
    def column(name: str, default: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((count,), given.get(name, default), dtype=dtype)

    return Parameters(
        temperature_N=column("temperature", 1.0),
        top_k_N=column("top_k", 0, torch.int64),
        top_p_N=column("top_p", 1.0),
        min_p_N=column("min_p", 0.0),
        uniform_N=torch.linspace(0, 1, count + 1, dtype=torch.float64)[:-1],
    )


def expected(logits: torch.Tensor, given: Parameters) -> list[int]:
    return plain(
        logits, temperature_N=given.temperature_N, top_k_N=given.top_k_N, top_p_N=given.top_p_N,
        min_p_N=given.min_p_N, uniform_N=given.uniform_N,
    ).tolist()  # fmt: skip


def make_logits(kind: str, count: int = ROWS, vocab: int = 400) -> torch.Tensor:
    logits = torch.randn(count, vocab + 8) * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "few":
        logits[:, torch.rand(vocab + 8) < 0.9] = -torch.inf
    return logits[:, :vocab]


CASES = [*((name, "normal") for name in FILTERS), ("min_p", "ties"), ("top_k", "ties"),
         ("top_p", "ties"), ("wide top_p", "few")]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_ids_are_the_references(name: str, kind: str) -> None:
    logits, given = make_logits(kind), parameters(ROWS, **FILTERS[name])
    assert draw(logits, given, SMALL).tolist() == expected(logits, given)


@pytest.mark.parametrize("top_p", [0.5, 0.7, 1.0])
def test_equal_logits_are_counted_exactly(top_p: float) -> None:
    """Sums are whole numbers here, and the borders lie on them."""
    logits = torch.zeros(4, 40)
    logits[:, ::2] = -0.0
    given = parameters(4, top_p=top_p, top_k=20)
    assert draw(logits, given, SMALL).tolist() == expected(logits, given)


def test_greedy_rows_take_the_first_largest() -> None:
    logits = torch.zeros(5, 700)
    logits[1, [3, 400]] = 2.0
    logits[2] = -torch.inf
    logits[3, [600, 650]] = torch.nan
    logits[4, 5], logits[4, 300] = torch.inf, -torch.nan
    given = parameters(5, temperature=0.0, top_k=3, top_p=0.5)
    assert draw(logits, given, SMALL).tolist() == [0, 3, 0, 600, 300] == expected(logits, given)


@pytest.mark.parametrize("given", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_rows_that_are_not_finite(given: dict[str, float]) -> None:
    logits = torch.randn(4, 600)
    logits[0, 500], logits[1, 300], logits[2] = torch.nan, torch.inf, -torch.inf
    values = parameters(4, **given)
    assert draw(logits, values, SMALL).tolist() == expected(logits, values)


def test_cold_and_hot_rows() -> None:
    for temperature in (1e-310, 1e9):
        for filters in ({}, {"top_p": 0.9}):
            logits = make_logits("normal", 2, 200)
            given = parameters(2, temperature=temperature, **filters)
            assert draw(logits, given, SMALL).tolist() == expected(logits, given)


def test_a_mixed_batch_equals_its_rows_alone() -> None:
    logits = make_logits("normal", 6, 300)
    given = parameters(6)
    given.temperature_N[0], given.top_k_N[1], given.top_p_N[2] = 0.0, 30, 0.9
    given.top_p_N[4], given.min_p_N[5] = 0.5, 0.1
    whole = draw(logits, given, SMALL).tolist()
    assert whole == expected(logits, given)
    for row in (1, 2, 3):
        part = slice(row, row + 1)
        one = Parameters(
            temperature_N=given.temperature_N[part], top_k_N=given.top_k_N[part],
            top_p_N=given.top_p_N[part], min_p_N=given.min_p_N[part],
            uniform_N=given.uniform_N[part],
        )  # fmt: skip
        assert draw(logits[part], one, SMALL).tolist() == [whole[row]]


def test_ids_beyond_the_vocabulary_are_never_drawn() -> None:
    padded = torch.full((2, 1024), 50.0)
    logits = padded[:, :300]
    logits.copy_(torch.randn(2, 300))
    for filters in ({}, {"top_k": 100}, {"temperature": 0.0}):
        given = parameters(2, **filters)
        found = draw(logits, given, SMALL).tolist()
        assert max(found) < 300 and found == expected(logits, given)


def test_offsets_beyond_31_bits() -> None:
    far = torch.empty(2**31 + 300)
    logits = far.as_strided((2, 300), (2**31, 1))
    logits.copy_(torch.randn(2, 300))
    logits[1, 17] = 90.0
    for given in ({"top_k": 1}, {"top_p": 0.5}, {}, {"temperature": 0.0}):
        assert draw(logits, parameters(2, **given), SMALL)[1] == 17


def test_a_whole_vocabulary_in_the_sizes_that_are_used() -> None:
    logits = torch.randn(2, 20_000) * 2
    given = parameters(2, temperature=0.6, top_p=0.95)
    given.uniform_N[:] = torch.tensor([0.3, 0.9])
    given.top_p_N[1] = 1.0
    found = sample(
        logits, temperature_N=given.temperature_N, top_k_N=given.top_k_N, top_p_N=given.top_p_N,
        min_p_N=given.min_p_N, uniform_N=given.uniform_N,
    )  # fmt: skip
    assert found.tolist() == expected(logits, given)


def test_no_rows() -> None:
    assert draw(torch.zeros(0, 50), parameters(0), SMALL).shape == (0,)
