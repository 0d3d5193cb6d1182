"""Attention over chosen rows against float64 on the same rounded inputs."""

import pytest
import torch
from triton_case import BOUNDS, error
from triton_sparse import far_pages, recorded

from batchmla import kernels
from batchmla.attention.mla import latent_record
from batchmla.kernels.ops import MlaDims, PackKind
from batchmla.kernels.triton.sparse import sparse_mla
from batchmla.kernels.triton.sparse_mla import LatentRows, attend_slots

LATENT, ROPE, PAGE_TOKENS, NUM_PAGES = 32, 8, 8, 15
NUM_ROWS = NUM_PAGES * PAGE_TOKENS
RECORD = latent_record(LATENT, ROPE)
RECORD_BOUND = 3e-3


def cached(dtype: torch.dtype, is_record: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages, and the rows that they stand for."""
    rows = torch.randn(NUM_ROWS, LATENT + ROPE).to(dtype)
    if not is_record:
        return rows.view(NUM_PAGES, PAGE_TOKENS, -1), rows
    cache = recorded(rows, RECORD, PAGE_TOKENS)
    read = kernels.load("torch").sparse.read_record
    return cache, read(cache, torch.arange(NUM_ROWS), RECORD, dtype)


def expected(
    q_NHC: torch.Tensor,
    q_NHR: torch.Tensor,
    rows: torch.Tensor,
    slots_NK: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[H, N, C]."""
    q_NHX, row_NKX = torch.cat((q_NHC, q_NHR), dim=2).double(), rows[slots_NK].double()
    weights = (torch.einsum("nhx,nkx->nhk", q_NHX, row_NKX) * scale).softmax(-1)
    return torch.einsum("nhk,nkc->hnc", weights, row_NKX[..., :LATENT])


def queries(num_rows: int, heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    q_HNC = torch.randn(heads, num_rows, LATENT).to(dtype)  # as a product leaves it
    q_NHD = torch.randn(num_rows, heads, 16 + ROPE).to(dtype)
    return q_HNC.transpose(0, 1), q_NHD[..., 16:]


def slots_of(num_rows: int, count: int) -> torch.Tensor:
    return torch.stack([torch.randperm(NUM_ROWS)[:count] for _ in range(num_rows)])


@pytest.mark.parametrize("is_record", [False, True])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(3, torch.float32), (3, torch.float16), *((heads, torch.bfloat16) for heads in (3, 20, 70))],
    ids=str,
)
def test_rows_over_their_slots(heads: int, dtype: torch.dtype, is_record: bool) -> None:
    """Few heads and many, a count that fills no tile; a row alone has the same bits."""
    cache, rows = cached(dtype, is_record)
    q_NHC, q_NHR = queries(3, heads, dtype)
    slots = slots_of(3, 70)
    parts = LatentRows.of(cache, RECORD if is_record else None)
    out = attend_slots(q_NHC, q_NHR, parts, slots, 0.2)
    bound = max(BOUNDS[dtype], RECORD_BOUND) if is_record else BOUNDS[dtype]
    assert out.dtype == dtype and error(out, expected(q_NHC, q_NHR, rows, slots, 0.2)) <= bound
    alone = attend_slots(q_NHC[1:2], q_NHR[1:2], parts, slots[1:2], 0.2)
    assert torch.equal(alone, out[:, 1:2])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("is_record", [False, True])
def test_published_widths(is_record: bool, heads: int) -> None:
    """512 + 64 elements, pages of 64 rows; rows whose tiles differ in size by far."""
    latent, rope, record = 512, 64, latent_record(512, 64)
    sizes = (10.0 ** torch.randint(-3, 3, (192, 9))).repeat_interleave(64, dim=1)
    rows = (torch.randn(192, latent + rope) * sizes).bfloat16()
    cache = rows.view(3, 64, -1)
    if is_record:
        assert record.num_bytes == 656
        cache = recorded(rows, record, 64)
        read = kernels.load("torch").sparse.read_record
        rows = read(cache, torch.arange(192), record, torch.bfloat16)
    q_NHC = (torch.randn(1, heads, latent) * 0.1).bfloat16()
    q_NHR = torch.randn(1, heads, rope).bfloat16()
    slots = torch.randperm(192)[None, :100]
    out = attend_slots(
        q_NHC, q_NHR, LatentRows.of(cache, record if is_record else None), slots, 0.01
    )
    q_NHX, row_NKX = torch.cat((q_NHC, q_NHR), dim=2).double(), rows[slots].double()
    weights = (torch.einsum("nhx,nkx->nhk", q_NHX, row_NKX) * 0.01).softmax(-1)
    wanted = torch.einsum("nhk,nkc->hnc", weights, row_NKX[..., :latent])
    assert error(out, wanted) <= RECORD_BOUND


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("heads", [4, 40])
def test_any_number_of_slots(heads: int, count: int) -> None:
    cache, rows = cached(torch.bfloat16, False)
    q_NHC, q_NHR = queries(2, heads, torch.bfloat16)
    slots = slots_of(2, count)
    out = attend_slots(q_NHC, q_NHR, LatentRows.of(cache, None), slots, 0.2)
    assert error(out, expected(q_NHC, q_NHR, rows, slots, 0.2)) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("heads", [4, 40])
@pytest.mark.parametrize("size", [1e3, 3e4])
def test_large_scores(heads: int, size: float) -> None:
    """One key outweighs all others."""
    cache, rows = cached(torch.bfloat16, False)
    q_NHC, q_NHR = queries(2, heads, torch.bfloat16)
    q_NHC = (q_NHC * size).contiguous()
    slots = slots_of(2, 64)
    out = attend_slots(q_NHC, q_NHR, LatentRows.of(cache, None), slots, 1.0)
    assert error(out, expected(q_NHC, q_NHR, rows, slots, 1.0)) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("heads", [4, 40])
@pytest.mark.parametrize("is_record", [False, True])
def test_only_slots_are_read(heads: int, is_record: bool) -> None:
    """All other rows hold no numbers; slots below 0 count for nothing, a row of them is zeros."""
    cache, rows = cached(torch.bfloat16, is_record)
    q_NHC, q_NHR = queries(2, heads, torch.bfloat16)
    used = torch.randperm(NUM_ROWS)[:20]
    others = torch.ones(NUM_ROWS, dtype=torch.bool)
    others[used] = False
    cache = cache.clone()
    cache.view(NUM_ROWS, -1)[others] = 255 if is_record else torch.nan
    slots = torch.full((2, 40), -1)
    slots[0, 10:30] = used
    parts = LatentRows.of(cache, RECORD if is_record else None)
    out = attend_slots(q_NHC, q_NHR, parts, slots, 0.2)
    wanted = expected(q_NHC[:1], q_NHR[:1], rows, used[None], 0.2)
    assert error(out[:, :1], wanted) <= RECORD_BOUND
    assert not out[:, 1].any()


@pytest.mark.parametrize("is_record", [False, True])
def test_rows_may_lie_behind_32_bits(is_record: bool) -> None:
    cache, rows = cached(torch.bfloat16, is_record)
    far = far_pages(PAGE_TOKENS, cache.shape[2], cache.dtype)
    far.copy_(cache[:3])
    q_NHC, q_NHR = queries(1, 4, torch.bfloat16)
    slots = torch.tensor([[23, 1, 16, 9]])
    out = attend_slots(q_NHC, q_NHR, LatentRows.of(far, RECORD if is_record else None), slots, 0.2)
    assert error(out, expected(q_NHC, q_NHR, rows, slots, 0.2)) <= RECORD_BOUND


def test_bytes_are_read_where_the_device_has_no_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = cached(torch.bfloat16, True)
    args = (*queries(1, 4, torch.bfloat16),)
    slots = slots_of(1, 20)
    before = attend_slots(*args, LatentRows.of(cache, RECORD), slots, 0.2)
    monkeypatch.setattr("batchmla.kernels.triton.sparse_mla.coded", lambda bytes_X: bytes_X)
    parts = LatentRows.of(cache, RECORD)
    assert parts.values.dtype == torch.uint8
    assert torch.equal(attend_slots(*args, parts, slots, 0.2), before)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_record", [False, True])
def test_the_op(is_record: bool, dtype: torch.dtype, num_rows: int) -> None:
    """From heads to heads, beside float64 of the specification."""
    dims = MlaDims(heads=3, nope=16, rope=ROPE, value=24, latent=LATENT, scale=0.2)
    cache, rows = cached(dtype, is_record)
    kv_b = (torch.randn(3 * 40, LATENT) * LATENT**-0.5).to(dtype)
    q_NHD = torch.randn(num_rows, 3, 24).to(dtype)
    slots = slots_of(num_rows, 30) if num_rows else torch.empty(0, 30, dtype=torch.int64)
    packed = kernels.load("torch").pack(PackKind.LATENT, kv_b)
    out = sparse_mla(q_NHD, cache, slots, packed, dims, RECORD if is_record else None)
    assert out.dtype == dtype and out.shape == (num_rows, 3 * 24)
    up_HXC = kv_b.double().view(3, 40, LATENT)
    q_NHC = torch.einsum("nhd,hdc->nhc", q_NHD[..., :16].double(), up_HXC[:, :16])
    z_HNC = expected(q_NHC, q_NHD[..., 16:].double(), rows, slots, 0.2)
    wanted = torch.einsum("hnc,hwc->nhw", z_HNC, up_HXC[:, 16:]).flatten(1)
    assert error(out, wanted) <= 3 * BOUNDS[dtype]  # rounded between the products too
