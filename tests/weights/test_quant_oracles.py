"""Quantised formats against the libraries that write and read them."""

from typing import Any

import pytest
import torch
from quantise import block_fp8, group_fp4, group_int4

from batchmla.kernels.quant import Coding, Quantised, Scheme


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.15


def weight_of(codes: torch.Tensor, scales: torch.Tensor, coding: Coding) -> Quantised:
    """With a scale for every 32 columns."""
    scheme = Scheme(
        coding=coding,
        block=32,
        scale_rows=len(scales),
        scale_dtype=scales.dtype,
        dtype=torch.float32,
    )
    return Quantised(scheme=scheme, codes=codes.view(torch.uint8), scales=scales)


def test_int4_words_are_those_of_compressed_tensors() -> None:
    library: Any = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = random(48, 160)
    made = group_int4(weight)
    scales = made.tensors["weight_scale"]
    integers = torch.from_numpy(made.values) / scales.double().repeat_interleave(32, dim=1)
    words = library.pack_to_int32(integers.round().to(torch.int8), 4)
    assert torch.equal(words, made.tensors["weight_packed"])
    unpacked = library.unpack_from_int32(words, 4, torch.Size(weight.shape))
    expected = unpacked.float() * scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(weight_of(words, scales, Coding.INT4).expanded(), expected)


def test_mxfp4_bytes_are_those_of_compressed_tensors() -> None:
    library: Any = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    scaling: Any = pytest.importorskip("compressed_tensors.compressors.mx_utils")
    made = group_fp4(random(48, 160), is_compressed=True)
    packed, scales = made.tensors["weight_packed"], made.tensors["weight_scale"]
    values = library.unpack_fp4_from_uint8(packed, 48, 160, dtype=torch.float32)
    assert torch.equal(library.pack_fp4_to_uint8(values), packed)
    factors = scaling.decompress_mx_scale(scales).float().repeat_interleave(32, dim=1)
    expanded = weight_of(packed, scales, Coding.E2M1).expanded()
    assert torch.equal(expanded, values * factors)


@pytest.mark.parametrize("form", ["fp8", "fp8 powers", "fp4"])
def test_values_are_those_that_transformers_expands(form: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = random(256, 384)  # whole blocks: transformers reads no others
    if form == "fp4":
        made = group_fp4(weight)
    else:
        made = block_fp8(weight, ending="scale", is_e8m0=form == "fp8 powers")
    library: Any = Fp8Dequantize(None)
    expected = library._dequantize_one(made.tensors["weight"], made.tensors["scale"], torch.float32)
    assert torch.equal(torch.from_numpy(made.values).float(), expected)
