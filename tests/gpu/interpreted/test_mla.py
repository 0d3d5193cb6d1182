"""Latent attention in the interpreter against float64: single queries, blocks of rows, expanded."""

import pytest
import torch
from paged_case import dense
from triton_case import BOUNDS, error
from triton_spans import Paged, expected_mla, latent_weight, make_paged, random

from batchmla import kernels
from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import MlaDims
from batchmla.kernels.sparse_ops import Record
from batchmla.kernels.triton.attention import Attention, Device, Limits
from batchmla.kernels.triton.plans import expanded_chunks
from batchmla.kernels.triton.prefill import prefill_tiling

NOBODY = Groups(members=())
TORCH = kernels.load("torch")
SMALL = MlaDims(heads=4, nope=16, rope=8, value=24, latent=24, scale=0.3)
EVEN = MlaDims(heads=20, nope=16, rope=16, value=16, latent=32, scale=0.3)
MANY = MlaDims(heads=40, nope=8, rope=16, value=8, latent=32, scale=0.3)
LENGTHS = [(1, n) for n in (1, 63, 0, 64, 65, 130)]
CHUNKS = [(5, 12), (1, 9), (19, 70), (2, 2)]


def attention(*, has_tma: bool = False, **limits: int) -> Attention:
    device = Device(has_tma=has_tma, codes=torch.float8_e4m3fn)
    return Attention(
        TORCH, TORCH.sparse.read_record, limits=Limits(**limits), device_of=lambda _: device
    )


def run(
    made: Attention, paged: Paged, q: torch.Tensor, dims: MlaDims, *, expands: bool = False
) -> torch.Tensor:
    spans = paged.spans(is_expanded=expands)
    absorbed, expanded = (NOBODY, spans) if expands else (spans, NOBODY)
    weight = latent_weight(dims, q.dtype)
    return made.mla(q, paged.cache_PBW, weight, absorbed, expanded, dims)


def queries(paged: Paged, dims: MlaDims, dtype: torch.dtype) -> torch.Tensor:
    return random(paged.num_tokens, dims.heads, dims.nope + dims.rope, seed=1, dtype=dtype)


def absorbed_bound(dtype: torch.dtype) -> float:
    """Queries and results are rounded once more, in latent space."""
    return 2 * BOUNDS[dtype]


def check(actual: torch.Tensor, paged: Paged, q: torch.Tensor, dims: MlaDims) -> None:
    weight = latent_weight(dims, q.dtype).plain
    assert weight is not None
    assert error(actual, expected_mla(paged, q, weight, dims)) <= absorbed_bound(q.dtype)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [*((SMALL, dtype) for dtype in BOUNDS), (EVEN, torch.bfloat16), (MANY, torch.bfloat16)],
)
def test_single_queries(dims: MlaDims, dtype: torch.dtype) -> None:
    paged = make_paged(LENGTHS, dims.latent + dims.rope, dtype, 16)
    q = queries(paged, dims, dtype)
    actual = run(attention(split_tokens=64), paged, q, dims)
    assert not actual[2].any()
    check(actual, paged, q, dims)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("expanded_bytes", [None, 0, 2**28])
def test_chunks(expanded_bytes: int | None, dtype: torch.dtype) -> None:
    """In latent space; expanded a page at a time; expanded at once."""
    paged = make_paged(CHUNKS, SMALL.latent + SMALL.rope, dtype, 32)
    q = queries(paged, SMALL, dtype)
    if expanded_bytes is None:
        actual = run(attention(split_tokens=32), paged, q, SMALL)
    else:
        actual = run(attention(expanded_bytes=expanded_bytes), paged, q, SMALL, expands=True)
    check(actual, paged, q, SMALL)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("dims", [EVEN, MANY], ids=["narrow", "wide"])
def test_kernels_alone(dims: MlaDims, dtype: torch.dtype) -> None:
    """Between rounded queries and rounded results in latent space there is one rounding."""
    paged = make_paged([*LENGTHS, (3, 70)], dims.latent + dims.rope, dtype, 16)
    q = random(paged.num_tokens, dims.heads, dims.latent + dims.rope, seed=3, dtype=dtype)
    z = torch.empty(paged.num_tokens, dims.heads, dims.latent, dtype=dtype)
    (spans,) = paged.spans().spans
    made = attention(split_tokens=64)
    made._attend_latents(q, paged.cache_PBW, spans, dims, z, None, is_part=False)
    wanted = torch.zeros(z.shape, dtype=torch.float64)
    parts = zip(paged.first_rows(), paged.sequences, paged.rows, strict=False)
    for first, (queries, keys), rows in parts:
        if keys:
            k = rows.double()[:, None].expand(-1, dims.heads, -1)
            some = slice(first, first + queries)
            wanted[some] = dense(q[some].double(), k, k[..., : dims.latent], dims.scale)
    assert error(z, wanted) <= BOUNDS[dtype]


@pytest.mark.parametrize("dims", [EVEN, MANY], ids=["narrow", "wide"])
def test_boxes_read_what_pointers_read(dims: MlaDims) -> None:
    paged = make_paged([(1, 65), (1, 190)], dims.latent + dims.rope, torch.bfloat16, 64)
    q = queries(paged, dims, torch.bfloat16)
    by_boxes, by_pointers = (
        run(attention(has_tma=has_tma, split_tokens=128), paged, q, dims)
        for has_tma in (True, False)
    )
    assert torch.equal(by_boxes, by_pointers)
    check(by_boxes, paged, q, dims)


@pytest.mark.parametrize(
    ("heads", "form"), [(20, "boxes"), (20, "bytes"), (36, "boxes"), (36, "pointers")]
)
def test_records(heads: int, form: str) -> None:
    """Codes and their factors stand for the rows that the specification reads."""
    dims = MlaDims(heads=heads, nope=8, rope=16, value=8, latent=256, scale=0.3)
    record, reference = Record(values=256, tile=128, tail=16), kernels.load("reference")
    paged = make_paged([(1, 70), (3, 20)], 272, torch.bfloat16, 64)
    rows = paged.cache_PBW.nan_to_num(0).flatten(0, 1)
    rows[:, :128] /= 40  # tiles of a row have different factors
    cache = torch.zeros(*paged.cache_PBW.shape[:2], record.num_bytes, dtype=torch.uint8)
    slots = torch.arange(len(rows))
    reference.sparse.write_record(cache, slots, rows, record)
    plain = reference.sparse.read_record(cache, slots, record, torch.float32)
    plain = plain.view(*cache.shape[:2], -1)
    read = [
        plain[pages].flatten(0, 1)[:keys]
        for pages, (_, keys) in zip(paged.pages_SP, paged.sequences, strict=True)
    ]
    q = queries(paged, dims, torch.bfloat16)
    codes = torch.uint8 if form == "bytes" else torch.float8_e4m3fn
    device = Device(has_tma=form == "boxes", codes=codes)
    made = Attention(
        TORCH, TORCH.sparse.read_record, limits=Limits(split_tokens=64), device_of=lambda _: device
    )
    weight = latent_weight(dims, q.dtype)
    assert weight.plain is not None
    expected = expected_mla(paged, q, weight.plain, dims, read)
    pairs = [(paged.spans(), NOBODY), (NOBODY, paged.spans(is_expanded=True))]
    for absorbed, expanded in pairs:
        actual = made.mla(q, cache, weight, absorbed, expanded, dims, record)
        assert error(actual, expected) <= absorbed_bound(q.dtype)


def test_a_cache_of_another_dtype() -> None:
    paged = make_paged([(1, 40), (4, 50)], 32, torch.float32, 16)
    q = queries(paged, SMALL, torch.bfloat16)
    paged.rows = [rows.bfloat16() for rows in paged.rows]
    check(run(attention(), paged, q, SMALL), paged, q, SMALL)
    check(run(attention(), paged, q, SMALL, expands=True), paged, q, SMALL)


def test_both_forms_in_one_step() -> None:
    paged = make_paged([(3, 40), (1, 20), (7, 7), (1, 33)], 32, torch.float32, 16)
    q = queries(paged, SMALL, torch.float32)
    weight = latent_weight(SMALL, q.dtype)
    absorbed, expanded = paged.spans([1, 3]), paged.spans([0, 2], is_expanded=True)
    actual = attention().mla(q, paged.cache_PBW, weight, absorbed, expanded, SMALL)
    check(actual, paged, q, SMALL)


@pytest.mark.parametrize("expands", [False, True])
def test_a_row_does_not_depend_on_others(expands: bool) -> None:
    sequences = [(1, 100), (6, 40), (1, 7)]
    paged = make_paged(sequences, 32, torch.bfloat16, 16)
    q = queries(paged, SMALL, torch.bfloat16)
    made, weight = attention(split_tokens=32, expanded_bytes=12_000), latent_weight(SMALL, q.dtype)

    def of(chosen: list[int]) -> torch.Tensor:
        spans = paged.spans(chosen, is_expanded=expands)
        forms = (NOBODY, spans) if expands else (spans, NOBODY)
        return made.mla(q, paged.cache_PBW, weight, *forms, SMALL)

    together = of([0, 1, 2])
    for index, first in enumerate(paged.first_rows()[:-1]):
        rows = slice(first, first + sequences[index][0])
        assert torch.equal(of([index])[rows], together[rows])


@pytest.mark.parametrize("limit", [1, 3, 5, 100])
def test_no_more_pages_are_expanded_at_a_time_than_is_said(limit: int) -> None:
    """Of all sequences together, those of two with the same pages once. Where a sequence is cut
    does not follow from the others."""
    sequences = [(6, 40), (5, 70), (2, 16), (7, 16), (3, 90)]
    paged = make_paged(sequences, 32, torch.bfloat16, 16)
    paged.pages_SP[1, :3] = paged.pages_SP[0, :3]
    (spans,) = paged.spans(is_expanded=True).spans
    tiling = prefill_tiling(24, 2, has_tma=False)
    chunks = expanded_chunks(spans, limit, tiling, torch.device("cpu"))
    assert max(len(chunk.pages_U) for chunk in chunks) <= limit
    assert {chunk.keys[0] % (16 * limit) for chunk in chunks} == {0}
    expanded = [page for chunk in chunks for page in chunk.pages_U.tolist()]
    held = {
        page for row, (_, keys) in zip(paged.pages_SP.tolist(), sequences, strict=True)
        for page in row[: -(-keys // 16)]
    }  # fmt: skip
    assert sorted(expanded) == sorted(held), "each once, here where sharers are neighbours"
    if limit == 100:
        assert len(chunks) == 1


def test_scores_of_any_size() -> None:
    """One key above all others; scores of +-1e4."""
    paged = make_paged([(1, 90), (3, 70)], 32, torch.float32, 16)
    q = queries(paged, SMALL, torch.float32) * 3e3
    check(run(attention(split_tokens=32), paged, q, SMALL), paged, q, SMALL)
    check(run(attention(), paged, q, SMALL, expands=True), paged, q, SMALL)


def test_rows_beyond_two_to_the_31_elements() -> None:
    width, page_tokens, pages = 32, 16, (2**31 // 512 + 5, 2**31 // 512 + 2)
    paged = make_paged([(1, 20)], width, torch.bfloat16, page_tokens)
    cache = torch.empty(max(pages) + 1, page_tokens, width, dtype=torch.bfloat16)
    for page, mine in zip(pages, paged.pages_SP[0].tolist(), strict=True):
        cache[page] = paged.cache_PBW[mine]
    far = Paged(paged.sequences, cache, torch.tensor([pages]), paged.rows)
    q = queries(paged, SMALL, torch.bfloat16)
    assert torch.equal(run(attention(), far, q, SMALL), run(attention(), paged, q, SMALL))
