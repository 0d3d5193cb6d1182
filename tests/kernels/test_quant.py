"""Quantised weights in every back end: their values, their products, and what they take."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from compare import assert_close
from quantise import E2M1_16, E4M3_256

from batchmla import kernels
from batchmla.kernels.ops import Ops, Packed, PackKind
from batchmla.kernels.quant import Coding, Quantised, Scheme, decode, scale_factors
from batchmla.kernels.reference.quant import expand

INT4_16 = np.arange(16) - 8.0
# coding, columns of a block, rows of a block, dtype of the scales
FORMS = {
    "fp8": (Coding.E4M3, 128, 128, torch.float32),
    "fp8 powers": (Coding.E4M3, 128, 128, torch.uint8),
    "fp4": (Coding.E2M1, 32, 1, torch.uint8),
    "int4": (Coding.INT4, 32, 1, torch.bfloat16),
}


def make(
    form: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Quantised, np.ndarray]:
    """Random codes and scales of any matrix or stack, and its float64 values."""
    coding, block, rows, scale_dtype = FORMS[form]
    source = np.random.default_rng(seed)
    *stack, outputs, inputs = shape
    scale_rows, blocks = -(-outputs // rows), -(-inputs // block)
    codes = source.integers(0, 256, (*stack, outputs, inputs // coding.values_per_byte), np.uint8)
    if coding is Coding.E4M3:
        codes[codes & 127 == 127] = 0x45  # no number
        values = E4M3_256[codes]
        size = 0.01
    else:
        table = INT4_16 if coding is Coding.INT4 else E2M1_16
        values = np.stack((table[codes & 15], table[codes >> 4]), axis=-1)
        values = values.reshape(*stack, outputs, inputs)
        size = 0.25
    exponents = source.integers(-3, 3, (*stack, scale_rows, blocks))
    if scale_dtype == torch.uint8:
        held = torch.from_numpy((exponents + 120).astype(np.uint8))
        factors = 2.0 ** (exponents - 7)
    else:
        wide = source.uniform(0.5, 1.5, exponents.shape) * size * inputs**-0.5
        held = torch.from_numpy(wide).to(scale_dtype)
        factors = held.double().numpy()
    mapped = np.arange(outputs) // rows
    columns = np.arange(inputs) // block
    values = values * factors[..., mapped, :][..., columns]
    scheme = Scheme(
        coding=coding, block=block, scale_rows=scale_rows, scale_dtype=scale_dtype, dtype=dtype,
        row_unit=rows,
    )  # fmt: skip
    scale_row_O = None if rows == 1 else torch.from_numpy(mapped.astype(np.int32))
    weight = Quantised(
        scheme=scheme, codes=torch.from_numpy(codes), scales=held, scale_row_O=scale_row_O
    )
    return weight, values


@pytest.fixture(scope="module", params=["reference", "cpu", "torch", "exact cpu", "exact torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    name = request.param.removeprefix("exact ")
    return kernels.load(name, exact=request.param != name)


def test_every_code_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None]
    decoded = decode(codes, Coding.E4M3)[0].double().numpy()
    is_number = np.arange(256) & 127 != 127
    assert np.array_equal(decoded[is_number], E4M3_256[is_number])
    assert np.isnan(decoded[~is_number]).all()
    for coding, table in ((Coding.E2M1, E2M1_16), (Coding.INT4, INT4_16)):
        pairs = decode(codes, coding).view(256, 2).double().numpy()
        assert np.array_equal(pairs[:, 0], table[np.arange(256) % 16])
        assert np.array_equal(pairs[:, 1], table[np.arange(256) // 16])


def test_every_exponent_has_its_value() -> None:
    factors = scale_factors(torch.arange(255, dtype=torch.uint8)).double().numpy()
    assert np.array_equal(factors, 2.0 ** (np.arange(255) - 127.0))


@pytest.mark.parametrize("shape", [(128, 128), (576, 160), (3, 130, 288), (1, 32)])
@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_float64(form: str, shape: tuple[int, ...]) -> None:
    weight, values = make(form, *shape)
    expected = torch.from_numpy(values).float()  # codes and scales fit float64, rounded once
    assert weight.shape == shape
    assert torch.equal(weight.expanded(torch.float32), expected)
    assert torch.equal(weight.expanded(torch.bfloat16), expected.bfloat16())
    assert torch.equal(expand(weight), expected)


@pytest.mark.parametrize("form", FORMS)
def test_some_outputs_are_a_view(form: str) -> None:
    weight, values = make(form, 300, 256)
    some = weight.outputs(120, 260)
    assert some.codes.untyped_storage().data_ptr() == weight.codes.untyped_storage().data_ptr()
    assert torch.equal(some.expanded(), torch.from_numpy(values[120:260]).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 576, 256), (70, 300, 160)])
def test_linear(
    ops: Ops, form: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    weight, values = make(form, outputs, inputs, dtype=dtype)
    values = torch.from_numpy(values).to(dtype).double()
    x_TI = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias_O = torch.randn(outputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = x_TI.double() @ values.T
    packed = ops.pack(PackKind.LINEAR, weight)
    assert packed.codes is not None and packed.plain is None
    assert_close("linear", ops.linear(x_TI, packed, None), expected)
    assert_close("with bias", ops.linear(x_TI, packed, bias_O), expected + bias_O.double())
    logits = ops.linear(x_TI, ops.pack(PackKind.LOGITS, make(form, outputs, inputs)[0]), None)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 40])
def test_experts(ops: Ops, form: str, dtype: torch.dtype, rows: int) -> None:
    num_experts, hidden, width, active = 5, 96, 128, 2
    up, up_values = make(form, num_experts, 2 * hidden, width, dtype=dtype)
    down, down_values = make(form, num_experts, width, hidden, seed=1, dtype=dtype)
    up_EFM, down_EMF = (
        torch.from_numpy(each).to(dtype).double() for each in (up_values, down_values)
    )
    source = torch.Generator().manual_seed(3)
    x_TM = torch.randn(rows, width, generator=source).to(dtype)
    ids_TA = torch.stack([1 + torch.randperm(4, generator=source)[:active] for _ in range(rows)])
    weights_TA = torch.rand(rows, active, generator=source)
    gate, value = torch.einsum("tm,efm->tef", x_TM.double(), up_EFM).chunk(2, -1)
    each = torch.einsum("tef,emf->tem", gate * torch.sigmoid(gate) * value, down_EMF)
    dense = torch.zeros(rows, num_experts).scatter_(1, ids_TA, weights_TA).double()
    expected = torch.einsum("te,tem->tm", dense, each)
    packed = ops.pack(PackKind.EXPERTS_UP, up), ops.pack(PackKind.EXPERTS_DOWN, down)
    assert_close("experts", ops.experts(x_TM, weights_TA, ids_TA, *packed), expected, scale=2)
    actual = ops.hybrid.clamped_experts(x_TM, weights_TA, ids_TA, *packed, 1e30)
    assert_close("clamped experts", actual, expected, scale=2)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_exact_mode_depends_on_itself(backend: str, dtype: torch.dtype) -> None:
    ops = kernels.load(backend, exact=True)
    x_TI = torch.randn(150, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = ops.pack(PackKind.LINEAR, make("fp8", 300, 256, dtype=dtype)[0])
    whole = ops.linear(x_TI, packed, None)
    for some in (slice(0, 1), slice(3, 10), slice(20, 117)):
        assert torch.equal(ops.linear(x_TI[some], packed, None), whole[some])
    ids_TA = torch.arange(300).view(150, 2) % 3
    ids_TA[:, 1] = (ids_TA[:, 0] + 1) % 3
    weights_TA = torch.rand(150, 2, generator=torch.Generator().manual_seed(2))
    up = ops.pack(PackKind.EXPERTS_UP, make("fp4", 3, 128, 256, dtype=dtype)[0])
    down = ops.pack(PackKind.EXPERTS_DOWN, make("int4", 3, 256, 64, dtype=dtype)[0])
    whole = ops.experts(x_TI, weights_TA, ids_TA, up, down)
    for some in (slice(0, 1), slice(3, 10), slice(20, 117)):
        part = ops.experts(x_TI[some], weights_TA[some], ids_TA[some], up, down)
        assert torch.equal(part, whole[some])


@pytest.mark.parametrize("kind", list(PackKind))
@pytest.mark.parametrize("form", FORMS)
def test_packed_bytes_are_those_of_the_packed_tensors(ops: Ops, kind: PackKind, form: str) -> None:
    shape = (3, 192, 96) if kind is PackKind.EXPERTS_UP else (192, 96)
    shape = (3, 96, 96) if kind is PackKind.EXPERTS_DOWN else shape
    weight = make(form, *shape, dtype=torch.bfloat16)[0]
    packed = ops.pack(kind, replace(weight, codes=weight.codes.clone()))
    assert ops.packed_bytes(kind, shape, weight.scheme) == held_bytes(packed)
    if kind in (PackKind.LINEAR, PackKind.EXPERTS_UP, PackKind.EXPERTS_DOWN):
        assert held_bytes(packed) < 1.2 * weight.scheme.nbytes(shape)


def held_bytes(packed: Packed) -> int:
    """Of every tensor."""
    tensors = [*packed.laid_out, *filter(torch.is_tensor, (packed.plain, packed.panels))]
    if packed.codes is not None:
        tensors += packed.codes.tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("rows", [1, 15, 33, 64, 300])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_products_have_the_bits_of_expanded_weights(form: str, rows: int) -> None:
    """576 outputs end inside a block of 128, 288 inputs too; 288 are no whole run of steps."""
    ops = kernels.load("cpu")
    if ops.name.startswith("cpu by torch"):
        pytest.skip(ops.name)
    source = torch.Generator().manual_seed(1)
    x_TI = torch.randn(rows, 288, generator=source).bfloat16()
    weight = make(form, 576, 288, dtype=torch.bfloat16)[0]
    for kind in (PackKind.LINEAR, PackKind.LOGITS):
        kept, plain = ops.pack(kind, weight), ops.pack(kind, weight.expanded())
        assert kept.code_panels is not None and plain.panels is not None
        assert torch.equal(ops.linear(x_TI, kept, None), ops.linear(x_TI, plain, None))
    up = make(form, 4, 128, 288, dtype=torch.bfloat16)[0]
    down = make(form, 4, 288, 64, seed=1, dtype=torch.bfloat16)[0]
    plain_pair = [
        ops.pack(kind, each.expanded())
        for kind, each in ((PackKind.EXPERTS_UP, up), (PackKind.EXPERTS_DOWN, down))
    ]
    kept_pair = [ops.pack(PackKind.EXPERTS_UP, up), ops.pack(PackKind.EXPERTS_DOWN, down)]
    ids_TA = torch.stack([torch.randperm(4, generator=source)[:2] for _ in range(rows)])
    weights_TA = torch.rand(rows, 2, generator=source)
    expected = ops.experts(x_TI, weights_TA, ids_TA, *plain_pair)
    for pair in (kept_pair, [kept_pair[0], plain_pair[1]], [plain_pair[0], kept_pair[1]]):
        assert torch.equal(ops.experts(x_TI, weights_TA, ids_TA, *pair), expected)
    expected = ops.hybrid.clamped_experts(x_TI, weights_TA, ids_TA, *plain_pair, 1.0)
    actual = ops.hybrid.clamped_experts(x_TI, weights_TA, ids_TA, *kept_pair, 1.0)
    assert torch.equal(actual, expected)


def test_every_code_is_decoded_by_compiled_kernels() -> None:
    ops = kernels.load("cpu")
    if ops.name.startswith("cpu by torch"):
        pytest.skip(ops.name)
    codes = torch.arange(256, dtype=torch.uint8)
    for coding, scale_dtype, scale in (
        (Coding.E4M3, torch.float32, 1.0), (Coding.E2M1, torch.uint8, 127),
        (Coding.INT4, torch.bfloat16, 1.0),
    ):  # fmt: skip
        held = codes.clone()
        if coding is Coding.E4M3:
            held[127::128] = 0
        inputs = 256 * coding.values_per_byte
        scheme = Scheme(
            coding=coding, block=inputs, scale_rows=32, scale_dtype=scale_dtype,
            dtype=torch.bfloat16,
        )  # fmt: skip
        weight = Quantised(
            scheme=scheme,
            codes=held.expand(32, -1).contiguous(),
            scales=torch.full((32, 1), scale).to(scale_dtype),
        )
        packed = ops.pack(PackKind.LOGITS, weight)
        one = torch.eye(inputs, dtype=torch.bfloat16)
        assert torch.equal(ops.linear(one, packed, None), weight.expanded().float().T)
