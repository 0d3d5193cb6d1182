"""Packing and plain linears of the GPU path, on a CPU."""

import pytest
import torch
from expert_case import quantised
from triton_case import BOUNDS, error

from batchmla.kernels.ops import PackKind
from batchmla.kernels.quant import Coding
from batchmla.kernels.triton.linear import linear, pack, packed_bytes

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("kind", [PackKind.LINEAR, PackKind.LOGITS])
def test_plain_weights_stay_as_they_are(kind: PackKind) -> None:
    weight, x, bias = torch.randn(9, 40).to(BF16), torch.randn(3, 40).to(BF16), torch.randn(9)
    packed = pack(kind, weight)
    assert packed.plain is weight and packed_bytes(kind, (9, 40), BF16) == weight.nbytes
    bias = bias.to(BF16)
    out = linear(x, packed, bias)
    dtype = F32 if kind is PackKind.LOGITS else BF16
    wanted = x.double() @ weight.double().T + bias.double()
    assert out.dtype == dtype and error(out, wanted) <= BOUNDS[dtype]


@pytest.mark.parametrize("kind", [PackKind.LINEAR, PackKind.LOGITS, PackKind.LATENT])
def test_quantised_weights(kind: PackKind) -> None:
    weight = quantised((1, 64, 96), Coding.E4M3, 32, row_block=32).matrix(0)
    packed, x = pack(kind, weight), torch.randn(3, 96).to(BF16)
    held = [packed.plain] if packed.quantised is None else packed.quantised.tensors
    assert (packed.quantised is None) == (kind is PackKind.LATENT)
    assert packed_bytes(kind, (64, 96), weight.scheme) == sum(each.nbytes for each in held)
    out = linear(x, packed, None)
    dtype = F32 if kind is PackKind.LOGITS else BF16
    wanted = x.double() @ weight.expanded(dtype).double().T
    assert out.dtype == dtype and error(out, wanted) <= BOUNDS[dtype]
