"""The gated delta rule in every form equals the rule as written, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from compare import assert_close

from batchmla import kernels
from batchmla.kernels.cpu.kda import delta, delta_by_tokens
from batchmla.kernels.kda_ops import LaneRows
from batchmla.kernels.reference.kda import delta as plain_delta

HEADS, WIDTH, SPARE_LANES = 3, 16, 4
COMPILED = kernels.load("cpu").kda.delta  # the same as blocks on a machine without
FORMS = {
    "blocks": delta, "tokens": delta_by_tokens, "plain": plain_delta, "compiled": COMPILED,
}  # fmt: skip
EXACT = {"tokens": delta_by_tokens, "compiled": kernels.load("cpu", exact=True).kda.delta}
COUNTS = ([1], [7], [8], [9], [63], [64], [65], [200], [1, 1, 1], [200, 3, 1, 64, 63, 9, 0, 17])


@dataclass
class Case:
    """Inputs of some sequences, and the lanes before the step; every other sequence begins."""

    inputs: tuple[torch.Tensor, ...]
    lanes: torch.Tensor
    rows: LaneRows

    @staticmethod
    def make(counts: Sequence[int], rate: float = 1.0, width: int = WIDTH) -> "Case":
        source = torch.Generator().manual_seed(0)
        total, num_lanes = sum(counts), len(counts) + SPARE_LANES

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=source)

        rates = rate * torch.logspace(-2, 1, HEADS)[:, None]
        decay = -rates * normal(total, HEADS, width).abs()
        vectors = [normal(total, HEADS, width) for _ in range(3)]
        lanes = torch.randperm(num_lanes, generator=source)[: len(counts)].numpy()
        is_first = np.arange(len(counts)) % 2 == 0
        states = normal(num_lanes, HEADS, width**2)
        states[torch.from_numpy(lanes[is_first])] = torch.nan
        rows = LaneRows(
            starts_S1=np.concatenate(([0], np.cumsum(counts))),
            lanes_S=lanes,
            is_first_S=is_first,
        )
        return Case((*vectors, decay, normal(total, HEADS).sigmoid()), states, rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_form_follows_the_rule(counts: list[int], form: str) -> None:
    case = Case.make(counts)
    wanted = case.lanes.double()
    expected = plain_delta(*case.inputs, wanted, case.rows)
    found = case.lanes.clone()
    assert_close("results", FORMS[form](*case.inputs, found, case.rows), expected)
    assert_close("states", found, wanted)
    others = np.setdiff1d(np.arange(len(found)), case.rows.lanes_S)
    assert len(others) == SPARE_LANES and torch.equal(found[others], case.lanes[others])


@pytest.mark.parametrize("form", ["blocks", "compiled"])
@pytest.mark.parametrize("rate", [1e-4, 30.0, 1e4])
def test_no_decay_is_too_weak_or_too_strong(rate: float, form: str) -> None:
    """Sums over a block from -0.0001 to below what float32 can raise e to."""
    case = Case.make([130, 64], rate=rate)
    wanted, found = case.lanes.double(), case.lanes.clone()
    expected = plain_delta(*case.inputs, wanted, case.rows)
    assert_close("results", FORMS[form](*case.inputs, found, case.rows), expected)
    assert_close("states", found, wanted)


@pytest.mark.parametrize("width", [16, 48, 80, 128, 24])
def test_compiled_columns_cover_every_width(width: int) -> None:
    """Whole and partial blocks of columns; 24 is left to torch."""
    case = Case.make([20, 1], width=width)
    wanted, found = case.lanes.double(), case.lanes.clone()
    expected = plain_delta(*case.inputs, wanted, case.rows)
    assert_close("results", COMPILED(*case.inputs, found, case.rows), expected)
    assert_close("states", found, wanted)


@pytest.mark.parametrize("form", ["blocks", "compiled"])
def test_a_sequence_of_no_numbers_does_not_touch_another(form: str) -> None:
    case = Case.make([70, 70, 3, 3])
    for values in case.inputs[:3]:
        values[:70] = torch.nan
        values[140:143] = torch.inf
    out = FORMS[form](*case.inputs, case.lanes.clone(), case.rows)
    assert not out[:70].isfinite().any() and not out[140:143].isfinite().any()
    assert out[70:140].isfinite().all() and out[143:].isfinite().all()


@pytest.mark.parametrize("form", EXACT)
def test_token_by_token_gives_the_same_bits_wherever_chunks_are_cut(form: str) -> None:
    case = Case.make([77])
    whole = case.lanes.clone()
    expected = EXACT[form](*case.inputs, whole, case.rows)
    for cut in (1, 7, 64):
        lanes, parts, lane = case.lanes.clone(), [], case.rows.lanes_S
        for start in range(0, 77, cut):
            some = [x[start : start + cut] for x in case.inputs]
            rows = LaneRows(
                starts_S1=np.array([0, len(some[0])]), lanes_S=lane,
                is_first_S=np.array([start == 0]),
            )  # fmt: skip
            parts.append(EXACT[form](*some, lanes, rows))  # type: ignore[arg-type]
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(lanes[lane], whole[lane])


@pytest.mark.parametrize("form", EXACT)
def test_token_by_token_gives_the_same_bits_in_every_batch(form: str) -> None:
    batch = Case.make([5, 1, 20])
    together = EXACT[form](*batch.inputs, batch.lanes.clone(), batch.rows)
    for index, (start, end) in enumerate(((0, 5), (5, 6), (6, 26))):
        rows = LaneRows(
            starts_S1=np.array([0, end - start]),
            lanes_S=batch.rows.lanes_S[index : index + 1],
            is_first_S=batch.rows.is_first_S[index : index + 1],
        )
        some = (x[start:end].clone() for x in batch.inputs)
        alone = EXACT[form](*some, batch.lanes.clone(), rows)  # type: ignore[call-arg]
        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_surrounds_the_rule_equals_its_formulas(backend: str, dtype: torch.dtype) -> None:
    ops, source = kernels.load(backend).kda, torch.Generator().manual_seed(1)
    num_tokens, channels = 13, 3 * WIDTH

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=source) * scale).to(dtype)

    x, weight = normal(20, channels), normal(channels, 1, 4)
    places = torch.randint(20, (4, num_tokens), generator=source)
    z = sum(x[places[tap]].double() * weight[:, 0, tap].double() for tap in range(4))
    assert_close("convolve", ops.convolve(x, weight, places), z * torch.sigmoid(z))
    forget, bias = (
        normal(num_tokens, HEADS * WIDTH, scale=20),
        torch.randn(HEADS * WIDTH, generator=source),
    )
    write, log_rate = normal(num_tokens, HEADS, scale=5), torch.randn(HEADS, generator=source)
    decay, beta = ops.gates(forget, write, log_rate, bias)
    soft = torch.nn.functional.softplus(forget.double() + bias.double(), threshold=1e9)
    rates = log_rate.double().exp().repeat_interleave(WIDTH)
    assert decay.dtype == beta.dtype == torch.float32
    assert_close("decay", decay.flatten(1), -soft * rates, scale=4)
    assert_close("beta", beta, write.double().sigmoid())
    rows, gate, weight_D = (
        torch.randn(num_tokens, HEADS, WIDTH),
        normal(13, HEADS, WIDTH),
        normal(16),
    )
    scale = (rows.double().square().mean(dim=-1, keepdim=True) + 1e-3).rsqrt()
    expected = rows.double() * scale * weight_D.double() * gate.double().sigmoid()
    assert_close("gated norm", ops.gated_norm(rows, gate, weight_D, 1e-3), expected)
