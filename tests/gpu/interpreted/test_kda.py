"""Kimi Delta Attention in the interpreter against float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from triton_case import BOUNDS, error

from batchmla.kernels.kda_ops import LaneRows
from batchmla.kernels.reference import kda as plain
from batchmla.kernels.triton.kda import convolve, gated_norm, gates
from batchmla.kernels.triton.kda_delta import delta

HEADS, SPARE_LANES = 2, 2
F32 = BOUNDS[torch.float32]


@dataclass
class Case:
    """Inputs of some sequences, and the lanes before the step; every other sequence begins."""

    inputs: tuple[torch.Tensor, ...]
    lanes: torch.Tensor
    rows: LaneRows

    @staticmethod
    def make(counts: Sequence[int], width: int, rate: float = 1.0) -> "Case":
        total, num_lanes = sum(counts), len(counts) + SPARE_LANES
        q, k, v = torch.randn(total, 3, HEADS, width).unbind(1)  # strided, as the engine has them
        decay = -rate * torch.randn(total, HEADS, width).abs()
        states = torch.randn(num_lanes, HEADS, width**2)
        lanes = torch.randperm(num_lanes)[: len(counts)].numpy()
        is_first = np.arange(len(counts)) % 2 == 0
        states[torch.from_numpy(lanes[is_first])] = torch.nan
        rows = LaneRows(
            starts_S1=np.concatenate(([0], np.cumsum(counts))), lanes_S=lanes, is_first_S=is_first
        )
        return Case((q, k, v, decay, torch.rand(total, HEADS)), states, rows)


@pytest.mark.parametrize(
    ("counts", "width", "rate"),
    [([1], 16, 1.0), ([9, 0, 1, 4], 16, 1.0), ([5, 6], 24, 1e-4), ([2], 128, 30.0),
     ([40], 8, 0.1), ([0], 16, 1.0)],
    ids=str,
)  # fmt: skip
def test_delta_follows_the_rule(counts: list[int], width: int, rate: float) -> None:
    case = Case.make(counts, width, rate)
    wanted = case.lanes.double()
    expected = plain.delta(*case.inputs, wanted, case.rows)
    found = case.lanes.clone()
    assert error(delta(*case.inputs, found, case.rows), expected) <= F32
    touched = case.rows.lanes_S[np.diff(case.rows.starts_S1) > 0]
    assert error(found[touched], wanted[touched]) <= F32
    others = np.setdiff1d(np.arange(len(found)), touched)
    same = (found[others] == case.lanes[others]) | case.lanes[others].isnan()
    assert same.all(), "a lane without rows was written"


def test_rounded_inputs() -> None:
    case = Case.make([4], 32)
    inputs = tuple(x.bfloat16() for x in case.inputs[:3]) + case.inputs[3:]
    wanted = case.lanes.double()
    expected = plain.delta(*inputs, wanted, case.rows)
    assert error(delta(*inputs, case.lanes, case.rows), expected) <= F32


def test_a_cut_or_neighbours_change_nothing() -> None:
    """Bit for bit: 7 tokens beside another sequence are 3 and then 4 alone."""
    case = Case.make([7, 5], 16)
    whole_state, cut_state = case.lanes.clone(), case.lanes.clone()
    whole = delta(*case.inputs, whole_state, case.rows)
    lanes = case.rows.lanes_S[:1]
    parts = []
    for first, end in ((0, 3), (3, 7)):
        rows = LaneRows(
            starts_S1=np.array([0, end - first]), lanes_S=lanes, is_first_S=np.array([first == 0])
        )
        parts.append(delta(*(x[first:end] for x in case.inputs), cut_state, rows))
    assert torch.equal(torch.cat(parts), whole[:7])
    assert torch.equal(cut_state[lanes], whole_state[lanes])


def test_the_plan_is_sent_once_for_all_layers() -> None:
    case = Case.make([2, 1], 16)
    first, second = case.lanes.clone(), case.lanes.clone()
    out = delta(*case.inputs, first, case.rows)
    plan = case.rows.kept.get(("delta", out.device), lambda: None)
    assert torch.equal(delta(*case.inputs, second, case.rows), out)
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    assert plan is case.rows.kept.get(("delta", out.device), lambda: None) and len(plan) == 2


def test_lanes_beyond_31_bits() -> None:
    case = Case.make([2], 16)
    size = HEADS * 16**2
    far = torch.empty(2**31 + size).as_strided((2, HEADS, 16**2), (2**31, 16**2, 1))
    far[1] = torch.randn(HEADS, 16**2)
    rows = LaneRows(starts_S1=np.array([0, 2]), lanes_S=np.array([1]), is_first_S=np.array([False]))
    wanted = far[1:].double()
    near = LaneRows(starts_S1=rows.starts_S1, lanes_S=np.array([0]), is_first_S=rows.is_first_S)
    expected = plain.delta(*case.inputs, wanted, near)
    assert error(delta(*case.inputs, far, rows), expected) <= F32
    assert error(far[1:], wanted) <= F32


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("width", [64, 1100])
def test_convolve(width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, width + 2).to(dtype)[:, :width], torch.randn(width, 1, 4).to(dtype)
    x[8] = 0
    places = torch.randint(9, (4, 5))
    found = convolve(x, weight, places)
    z = torch.einsum("wtc,cw->tc", x[places].double(), weight[:, 0].double())
    assert found.dtype == dtype and error(found, z * z.sigmoid()) <= BOUNDS[dtype]
    assert torch.equal(convolve(x, weight, places[:, 2:3]), found[2:3])


def test_gates() -> None:
    forget = torch.randn(3, HEADS * 520).bfloat16() * torch.logspace(-3, 2, HEADS * 520)
    write = torch.randn(3, HEADS + 3)[:, 1 : 1 + HEADS]
    rate, bias = torch.randn(HEADS), torch.randn(HEADS * 520)
    decay, beta = gates(forget, write, rate, bias)
    wanted = torch.nn.functional.softplus(forget.double() + bias.double(), threshold=1000)
    wanted = -rate.double().exp()[:, None] * wanted.view(3, HEADS, -1)
    assert error(decay, wanted) <= F32 and error(beta, write.double().sigmoid()) <= F32
    assert decay.dtype == beta.dtype == torch.float32
    torch.testing.assert_close(decay.double(), wanted, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(3, 128), (9, 80), (0, 16)])
def test_gated_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, gate = torch.randn(tokens, HEADS, width), torch.randn(tokens, HEADS, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    found = gated_norm(x, gate, weight, 1e-5)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert found.dtype == dtype
    assert error(found, normed * gate.double().sigmoid()) <= BOUNDS[dtype]
    assert torch.equal(gated_norm(x[1:2], gate[1:2], weight, 1e-5), found[1:2])
