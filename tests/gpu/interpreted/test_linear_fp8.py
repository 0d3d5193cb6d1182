"""Which product a linear takes; the block-scaled one of torch is played by a float64 one."""

import pytest
import torch
from expert_case import quantised
from triton_case import BOUNDS, error

from batchmla.kernels.ops import Packed, PackKind
from batchmla.kernels.quant import Coding
from batchmla.kernels.reference.linear import linear as reference_linear
from batchmla.kernels.triton.linear_fp8 import Fp8Linears
from batchmla.kernels.triton.quant import quantise

BF16 = torch.bfloat16
SHAPE = (256, 512)


class Played:
    """Takes scales [B, S] only, as torch's does; `factor` makes it wrong."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.rows: list[int] = []

    def __call__(
        self,
        codes_TI: torch.Tensor,
        scales_TB: torch.Tensor,
        codes_IO: torch.Tensor,
        scales_BS: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        inputs, outputs = codes_IO.shape
        if scales_BS.shape != (inputs // 128, outputs // 128):
            raise RuntimeError("scales of a shape that is not taken")
        assert scales_TB.stride(0) == 1, "scales of rows must lie side by side"
        self.rows.append(len(codes_TI))
        x = codes_TI.double() * scales_TB.double().repeat_interleave(128, 1)
        factors = scales_BS.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (x @ (codes_IO.double() * factors) * self.factor).to(dtype)


def weight(kind: PackKind = PackKind.LINEAR) -> Packed:
    made = quantised((1, *SHAPE), Coding.E4M3, 128, row_block=128).matrix(0)
    return Packed(kind, made.shape, quantised=made)


def expected(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    codes, scales = quantise(x)
    assert packed.quantised is not None
    as_read = codes.double() * scales.double().repeat_interleave(128, 1)
    return as_read @ packed.quantised.expanded(torch.float64).T


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_torchs_product_is_used_where_it_is_right(factor: float) -> None:
    played, packed, x = Played(factor), weight(), torch.randn(8, SHAPE[1]).to(BF16)
    linears = Fp8Linears(reference_linear, product=played)
    for _ in range(2):
        out = linears.linear(x, packed, None)
        assert out.dtype == BF16 and error(out, expected(x, packed)) <= BOUNDS[BF16]
    assert played.rows == ([16, 8, 8] if factor == 1.0 else [16])


def test_what_it_cannot_do_is_ours() -> None:
    played, packed = Played(), weight()
    linears = Fp8Linears(reference_linear, product=played)
    x, bias = torch.randn(3, SHAPE[1]).to(BF16), torch.randn(SHAPE[0]).to(BF16)
    assert error(linears.linear(x, packed, None), expected(x, packed)) <= BOUNDS[BF16]
    wanted = expected(x, packed) + bias.double()
    assert error(linears.linear(x, packed, bias), wanted) <= BOUNDS[BF16]
    logits = linears.linear(x, weight_like(packed, PackKind.LOGITS), None)
    assert logits.dtype == torch.float32
    assert error(logits, expected(x, packed)) <= BOUNDS[torch.float32]
    assert not played.rows


def weight_like(packed: Packed, kind: PackKind) -> Packed:
    return Packed(kind, packed.shape, quantised=packed.quantised)


def test_exact_rows_do_not_depend_on_others() -> None:
    played, packed, x = Played(), weight(), torch.randn(36, SHAPE[1]).to(BF16)
    linears = Fp8Linears(reference_linear, is_exact=True, product=played)
    among, alone = linears.linear(x, packed, None), linears.linear(x[33:34], packed, None)
    assert torch.equal(among[33:34], alone) and not played.rows


def test_other_weights_go_elsewhere() -> None:
    linears, x = Fp8Linears(reference_linear), torch.randn(3, 64).to(BF16)
    plain = Packed(PackKind.LINEAR, (8, 64), plain=torch.randn(8, 64).to(BF16))
    assert torch.equal(linears.linear(x, plain, None), reference_linear(x, plain, None))
    made = quantised((1, 8, 64), Coding.INT4, 32).matrix(0)
    coded = Packed(PackKind.LINEAR, (8, 64), quantised=made)
    assert torch.equal(linears.linear(x, coded, None), reference_linear(x, coded, None))


def test_without_torchs_product() -> None:
    """On a CPU torch raises, whatever the layout."""
    packed, x = weight(), torch.randn(4, SHAPE[1]).to(BF16)
    out = Fp8Linears(reference_linear).linear(x, packed, None)
    assert error(out, expected(x, packed)) <= BOUNDS[BF16]


def test_no_trial_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    linears, device = Fp8Linears(reference_linear), torch.device("cuda")
    monkeypatch.setattr(linears, "_try", tried.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert linears._layout(device) is None and not tried
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    linears._layout(device)
    linears._layout(device)
    assert tried == [device]
