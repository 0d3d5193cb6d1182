"""The exact back end: no result of a row depends on its call, its place or its neighbours."""

from collections.abc import Callable
from functools import reduce

import pytest
import torch
from compare import assert_close

from batchmla.kernels import load
from batchmla.kernels.cpu.rows import COUNTS, RowCounts, aligned, cancelling, find_counts
from batchmla.kernels.ops import Packed, PackKind, RopeLayout, RouterDims, Scoring

NUM_ROWS = 150
FORMS = pytest.mark.parametrize("form", ["cpu", "torch"])
DTYPES = [torch.bfloat16, torch.float32]
RowFunction = Callable[[torch.Tensor], torch.Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_alone(function: RowFunction, x: torch.Tensor) -> torch.Tensor:
    """The rows of `function(x)` are the same for other batches, places and neighbours."""
    whole = function(x)
    turned = function(x.flip(0)).flip(0)
    assert torch.equal(whole, turned), "the place of a row matters"
    start = 0
    for count in (1, 2, 7, 64, 76):
        part = function(x[start : start + count])
        assert torch.equal(part, whole[start : start + count]), f"{count} rows differ"
        start += count
    assert start == NUM_ROWS
    return whole


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (PackKind.LINEAR, (192, 768)),
        (PackKind.LINEAR, (40, 100)),
        (PackKind.LATENT, (256, 512)),
        (PackKind.LOGITS, (512, 192)),
    ],
)
def test_linears(
    form: str, kind: PackKind, shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    ops = load(form, exact=True)
    weight = ops.pack(kind, random(*shape, dtype=dtype))
    bias = random(shape[0], dtype=dtype, seed=1) if has_bias and kind is PackKind.LINEAR else None
    x_TI = random(NUM_ROWS, shape[1], dtype=dtype, seed=2)
    y_TO = assert_rows_alone(lambda x: ops.linear(x, weight, bias), x_TI)
    plain = load("reference")
    expected = plain.linear(x_TI, plain.pack(kind, random(*shape, dtype=dtype)), bias)
    assert y_TO.dtype == expected.dtype
    scale = 1 if y_TO.dtype == dtype else 8
    assert_close("linear", y_TO, expected, scale=scale)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linears_of_a_strided_input(form: str, dtype: torch.dtype) -> None:
    ops = load(form, exact=True)
    weight = ops.pack(PackKind.LINEAR, random(64, 100, dtype=dtype))
    wide_TX = random(NUM_ROWS, 131, dtype=dtype, seed=2)
    whole = ops.linear(wide_TX[:, 3:103], weight, None)
    assert torch.equal(whole, ops.linear(wide_TX[:, 3:103].contiguous(), weight, None))


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [48, 64])
@pytest.mark.parametrize("width", [768, 96])
def test_experts_and_routing(form: str, width: int, hidden: int, dtype: torch.dtype) -> None:
    ops = load(form, exact=True)
    up, down = (
        random(8, 2 * hidden, width, dtype=dtype),
        random(8, width, hidden, dtype=dtype, seed=1),
    )
    packed = ops.pack(PackKind.EXPERTS_UP, up), ops.pack(PackKind.EXPERTS_DOWN, down)
    router, bias = random(8, width, seed=3), random(8, seed=4)
    dims = RouterDims(active=3, groups=2, kept_groups=1, normalise=True, scale=2.0)

    def moe(x_TM: torch.Tensor) -> torch.Tensor:
        weights_TA, ids_TA = ops.route(x_TM, router, bias, dims)
        return ops.experts(x_TM, weights_TA, ids_TA, *packed)

    x_TM = random(NUM_ROWS, width, dtype=dtype, seed=2)
    out_TM = assert_rows_alone(moe, x_TM)
    weights_TA, ids_TA = ops.route(x_TM, router, bias, dims)
    plain = (Packed(p.kind, p.shape, plain=w) for p, w in zip(packed, (up, down), strict=True))
    expected = load("reference").experts(x_TM, weights_TA, ids_TA, *plain)
    assert_close("experts", out_TM, expected, scale=2)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scoring", Scoring)
def test_the_rest_row_by_row(form: str, scoring: Scoring, dtype: torch.dtype) -> None:
    ops = load(form, exact=True)
    dims = RouterDims(
        active=2, groups=1, kept_groups=1, normalise=False, scale=1.0, scoring=scoring
    )
    router = random(10, 72, seed=3)
    x_TM = random(NUM_ROWS, 72, dtype=dtype, seed=2) * 3
    assert_rows_alone(lambda x: ops.route(x, router, None, dims)[0], x_TM)
    assert_rows_alone(lambda x: ops.norm(x[:, :70], random(70, dtype=dtype), 1e-6), x_TM)
    silu_TF = assert_rows_alone(lambda x: ops.act_mul(x[:, :70].clone()), x_TM)
    assert_close("act_mul", silu_TF, load("reference").act_mul(x_TM[:, :70]))

    def rotate(x_TX: torch.Tensor) -> torch.Tensor:
        heads_THR = x_TX[:, :64].reshape(-1, 2, 32).clone()
        angles_TR = x_TX[:, :16].float()
        ops.rope(heads_THR, angles_TR.cos(), angles_TR.sin(), RopeLayout.INTERLEAVED)
        return heads_THR

    assert_rows_alone(rotate, x_TM)


def test_a_product_whose_order_follows_its_rows_is_found_out() -> None:
    """A product that sums in another order from 32 rows on agrees with 16 rows below that."""
    x_TI, w_OI = cancelling(512, (24, 64), torch.float32)

    def product(x: torch.Tensor) -> torch.Tensor:
        terms = (x[:, None, :] * w_OI).unbind(-1)
        return reduce(torch.add, terms if len(x) < 32 else terms[::-1])

    assert find_counts(product, x_TI, 16) == (1, 2, 4, 8, 16)
    assert find_counts(product, x_TI, 64) == (32, 48, 64, 128, 256, 512)


def test_a_product_that_knows_a_rows_place_runs_row_by_row() -> None:
    x_TI, w_OI = cancelling(512, (24, 64), torch.float32)
    assert find_counts(lambda x: x @ w_OI.T + torch.arange(len(x))[:, None], x_TI, 64) == (1,)


@pytest.mark.parametrize("counts", [COUNTS, (1,), (48, 64, 128), (2, 4, 8, 16, 32)])
def test_cuts_cover_all_rows_with_little_beyond(counts: tuple[int, ...]) -> None:
    row_counts = RowCounts.of(counts)
    for num_rows in (0, 1, 3, 31, 40, 47, 65, 129, 600, 1024):
        blocks = row_counts.cut(num_rows)
        assert set(blocks) <= set(counts)
        assert sum(blocks[:-1]) < num_rows <= sum(blocks) or num_rows == sum(blocks) == 0
    x = random(77, 20)
    assert torch.equal(row_counts.run(x, lambda block: block * 2), x * 2)
    heads = random(3, 77, 20)
    assert torch.equal(row_counts.run(heads, lambda block: block + 1), heads + 1)


def test_aligned_copies_only_what_it_must() -> None:
    x = random(64, 32)
    assert aligned(x, 64) is x
    padded = aligned(x[:5, 1:], 16)
    assert padded.shape == (16, 31) and torch.equal(padded[:5], x[:5, 1:])
    assert not padded[5:].any()


def test_only_the_cpu_back_end_has_an_exact_form() -> None:
    with pytest.raises(ValueError, match="no exact form"):
        load("reference", exact=True)
