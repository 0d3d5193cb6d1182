"""Both back ends against float64 formulas on odd sizes; attention and routing lie beside."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from compare import assert_close

from batchmla import kernels
from batchmla.kernels.cpu import linear as cpu_linear
from batchmla.kernels.cpu.experts import MAX_ROWS_AT_ONCE, padded_rows
from batchmla.kernels.ops import Ops, PackKind, RopeLayout

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BACKENDS = ["cpu", "torch", "reference"]


@pytest.fixture(params=BACKENDS, scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return kernels.load(request.param)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    made: torch.dtype = request.param
    return made


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


def test_unknown_back_end_is_named() -> None:
    with pytest.raises(ValueError, match=r"'triton2'.*reference, cpu"):
        kernels.load("triton2")


def test_folder_cannot_be_imported_under_its_bare_name() -> None:
    code = "import sys; sys.path.insert(0, '.'); import kernels"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode and "import batchmla.kernels" in done.stderr


@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 1, 1), (3, 17, 5), (65, 33, 100)])
@pytest.mark.parametrize("kind", [PackKind.LINEAR, PackKind.LOGITS])
def test_linear(
    ops: Ops, dtype: torch.dtype, kind: PackKind, rows: int, outs: int, ins: int
) -> None:
    x = random(rows, 2 * ins).to(dtype)[:, :ins]  # rows that do not follow each other
    weight, bias = random(outs, ins, seed=1, scale=ins**-0.5).to(dtype), random(outs).to(dtype)
    packed = ops.pack(kind, weight.clone())
    expected = x.double() @ weight.double().T
    actual = ops.linear(x, packed, None)
    if kind is PackKind.LOGITS:
        assert actual.dtype == torch.float32
        assert_close("logits", actual, expected)
        return
    assert actual.dtype == dtype
    assert_close("linear", actual, expected)
    assert_close("with bias", ops.linear(x, packed, bias), expected + bias.double())


def test_bfloat16_logits_leave_the_settings_alone(ops: Ops) -> None:
    x, weight = random(4, 64), random(96, 64, seed=1)
    before = x @ weight.T
    packed = ops.pack(PackKind.LOGITS, weight.bfloat16())
    ops.linear(x.bfloat16(), packed, None)
    assert torch.equal(x @ weight.T, before)


def test_missing_prepacking_is_logged_once_and_still_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_linear, "_reorder", lambda _: (_ for _ in ()).throw(RuntimeError("no")))
    ops = kernels.load("torch")
    assert "prepacking is off" in caplog.text
    x, weight = random(3, 16).bfloat16(), random(5, 16, seed=1).bfloat16()
    packed = ops.pack(PackKind.LINEAR, weight)
    assert_close("plain", ops.linear(x, packed, None), x.double() @ weight.double().T)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", list(PackKind))
@pytest.mark.parametrize("width", [24, 320])
def test_packed_bytes_are_those_of_the_packed_tensors(
    ops: Ops, dtype: torch.dtype, kind: PackKind, width: int
) -> None:
    shape = (3, 2 * width, width) if kind.startswith("experts") else (2 * width, width)
    weight = random(*shape).to(dtype)
    packed = ops.pack(kind, weight)
    tensors = [*packed.laid_out, *filter(torch.is_tensor, (packed.plain, packed.panels))]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert ops.packed_bytes(kind, shape, dtype) == held


@pytest.mark.parametrize("width", [1, 7, 192])
def test_norms(ops: Ops, dtype: torch.dtype, width: int) -> None:
    x, residual = (random(5, 2 * width, seed=s, scale=3).to(dtype)[:, :width] for s in (0, 1))
    weight = (1 + random(width, seed=2, scale=0.1)).to(dtype)

    def expected(value: torch.Tensor) -> torch.Tensor:
        mean = value.double().pow(2).mean(-1, keepdim=True)
        return weight.double() * value.double() / (mean + 1e-6).sqrt()

    assert_close("norm", ops.norm(x, weight, 1e-6), expected(x))
    normed, total = ops.add_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_close("add_norm", normed, expected(total))


@pytest.mark.parametrize("layout", list(RopeLayout))
def test_rope_rotates_a_strided_view_in_place(
    ops: Ops, dtype: torch.dtype, layout: RopeLayout
) -> None:
    row = random(9, 3, 20).to(dtype)
    before = row.clone()
    angles = random(9, 4, seed=1, scale=10).double()
    ops.rope(row[..., 12:], angles.cos().float(), angles.sin().float(), layout)
    assert torch.equal(row[..., :12], before[..., :12])
    part = before[..., 12:].double()
    if layout is RopeLayout.INTERLEAVED:
        pairs = torch.complex(part[..., 0::2], part[..., 1::2])
    else:
        pairs = torch.complex(part[..., :4], part[..., 4:])
    turned = pairs * torch.exp(1j * angles)[:, None]
    joined = (
        torch.stack((turned.real, turned.imag), -1).flatten(-2)
        if layout is RopeLayout.INTERLEAVED
        else torch.cat((turned.real, turned.imag), -1)
    )
    assert_close("rope", row[..., 12:], joined)


def test_act_mul(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = random(7, 26, scale=4).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close("act_mul", ops.act_mul(gate_up), gate * torch.sigmoid(gate) * up)


def test_padded_rows_are_few_and_not_much_larger() -> None:
    counts_E = np.arange(4097)
    padded_E = padded_rows(counts_E)
    assert padded_E[0] == 0 and (padded_E >= counts_E).all() and (np.diff(padded_E) >= 0).all()
    assert (padded_E[64:] <= 1.5 * counts_E[64:]).all() and len(np.unique(padded_E)) < 40


@pytest.mark.parametrize("rows", [1, 2, 63, MAX_ROWS_AT_ONCE + 1])  # loop and all at once
@pytest.mark.parametrize("hidden", [144, 160])  # of whole panels or not
@pytest.mark.parametrize("width", [48, 256])  # one side by side in bfloat16, one looped over
def test_experts(ops: Ops, dtype: torch.dtype, rows: int, width: int, hidden: int) -> None:
    if ops.name == "reference" and rows > 63:
        pytest.skip("one row after the other: slow, and nothing depends on their number")
    num_experts, active = 6, 2
    x = random(rows, width).to(dtype)
    up = random(num_experts, 2 * hidden, width, seed=1, scale=width**-0.5).to(dtype)
    down = random(num_experts, width, hidden, seed=2, scale=hidden**-0.5).to(dtype)
    generator = torch.Generator().manual_seed(3)
    # expert 0 is never chosen
    ids = torch.stack([1 + torch.randperm(5, generator=generator)[:active] for _ in range(rows)])
    weights = torch.rand(rows, active, generator=generator)
    packed_up = ops.pack(PackKind.EXPERTS_UP, up.clone())
    packed_down = ops.pack(PackKind.EXPERTS_DOWN, down.clone())
    actual = ops.experts(x, weights, ids, packed_up, packed_down)
    hidden_TEF = torch.einsum("tm,efm->tef", x.double(), up.double())
    gate, value = hidden_TEF.chunk(2, -1)
    each = torch.einsum("tef,emf->tem", gate * torch.sigmoid(gate) * value, down.double())
    dense = torch.zeros(rows, num_experts).scatter_(1, ids, weights).double()
    assert_close("experts", actual, torch.einsum("te,tem->tm", dense, each), scale=2)


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("width", [8, 64])
def test_a_rotated_row_has_the_same_bits_wherever_it_stands(
    ops: Ops, dtype: torch.dtype, width: int, num_heads: int
) -> None:
    whole = random(40, num_heads, width).to(dtype)
    angles = random(40, width // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    part = whole[5:12].clone()
    ops.rope(whole, cos, sin, RopeLayout.INTERLEAVED)
    ops.rope(part, cos[5:12], sin[5:12], RopeLayout.INTERLEAVED)
    assert torch.equal(part, whole[5:12])


@pytest.mark.parametrize("width", [16, 64])
def test_rope_by_complex_numbers_turns_pairs(ops: Ops, dtype: torch.dtype, width: int) -> None:
    row = random(9, 2, width + 6).to(dtype)[..., 6:]
    angles = random(9, width // 2, seed=1)
    pairs = torch.view_as_complex(row.double().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
    ops.rope(row, angles.cos(), angles.sin(), RopeLayout.INTERLEAVED)
    assert_close("rope", row, torch.view_as_real(turned).flatten(-2))
