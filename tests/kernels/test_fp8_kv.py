"""Attention over caches of e4m3 records: the bytes, the same numbers as over what they stand for,
and the error against dense float64 attention over the rows before rounding."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from paged_case import BATCHES, Case, dense, make_case

from batchmla import kernels
from batchmla.attention.gqa import head_record
from batchmla.attention.groups import make_groups
from batchmla.attention.mla import latent_record
from batchmla.attention.spans import expanded_first, read_in_place, whole_runs
from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import MlaDims, Ops, PackKind
from batchmla.kernels.sparse_ops import Record

BF16 = torch.bfloat16
NONE = Groups(members=())
KV_HEADS, HEAD_DIM = 2, 64
# e4m3 rounds a value by 1/16 at most and 1/40 in the mean square: once the values themselves, once
# the keys, and with them the scores, whose deviation is 1 here
MOST_ERROR = 0.05
Attend = Callable[[Case, torch.Tensor, Record | None], torch.Tensor]


@pytest.fixture(scope="module")
def compiled() -> Ops:
    made = kernels.load("cpu")
    if made.name.startswith("cpu by torch"):
        pytest.skip(made.name)
    return made


def coded(cache_PBW: torch.Tensor, record: Record) -> torch.Tensor:
    """All rows of a cache as records."""
    num_pages, page_tokens, _ = cache_PBW.shape
    found = torch.zeros(num_pages, page_tokens, record.num_bytes, dtype=torch.uint8)
    slots = torch.arange(num_pages * page_tokens)
    kernels.load("torch").sparse.write_record(found, slots, cache_PBW.flatten(0, 1), record)
    return found


def decoded(cache_PBY: torch.Tensor, record: Record, dtype: torch.dtype) -> torch.Tensor:
    """The plain cache that records stand for."""
    slots = torch.arange(cache_PBY.shape[0] * cache_PBY.shape[1])
    rows = kernels.load("torch").sparse.read_record(cache_PBY, slots, record, dtype)
    return rows.view(*cache_PBY.shape[:2], -1)


def share_of_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the norm."""
    return float((actual.double() - expected).norm() / expected.norm())


def gqa_case(batch: str, dtype: torch.dtype, page_tokens: int) -> tuple[Case, torch.Tensor]:
    torch.manual_seed(4)
    width = 2 * KV_HEADS * HEAD_DIM
    case = make_case(batch, width, dtype, batch != "nested", page_tokens=page_tokens)
    return case, torch.randn(len(case.step.tokens_T), 3 * KV_HEADS, HEAD_DIM).to(dtype)


def check_gqa(ops: Ops, case: Case, q: torch.Tensor, groups: Groups) -> None:
    record = head_record(KV_HEADS, HEAD_DIM)
    halves = [coded(half, record) for half in case.cache.chunk(2, dim=-1)]
    actual = ops.gqa(q, *halves, groups, 0.125, record)
    plain = [decoded(half, record, q.dtype) for half in halves]
    assert torch.equal(actual, ops.gqa(q, *plain, groups, 0.125))
    starts, expected = case.step.host_starts_S1, []
    for index, rows in enumerate(case.rows):
        k, v = (
            half.double().view(-1, KV_HEADS, HEAD_DIM).repeat_interleave(3, 1)
            for half in rows.chunk(2, dim=-1)
        )
        expected.append(dense(q[starts[index] : starts[index + 1]].double(), k, v, 0.125))
    assert 1e-3 < share_of_error(actual, torch.cat(expected).flatten(1)) < MOST_ERROR


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("batch", BATCHES)
def test_gqa_over_records(backend: str, batch: str, dtype: torch.dtype) -> None:
    case, q = gqa_case(batch, dtype, 8)
    groups = make_groups(case.step, np.arange(len(case.rows)), dtype)
    check_gqa(kernels.load(backend), case, q, groups)


@pytest.mark.parametrize("page_tokens", [4, 8, 64])
@pytest.mark.parametrize("batch", BATCHES)
def test_compiled_gqa_over_records(compiled: Ops, batch: str, page_tokens: int) -> None:
    case, q = gqa_case(batch, BF16, page_tokens)
    check_gqa(compiled, case, q, read_in_place(case.step, whole_runs(case.step)))


def check_mla(
    ops: Ops, case: Case, dims: MlaDims, dtype: torch.dtype, absorbed: Groups, expanded: Groups
) -> None:
    torch.manual_seed(5)
    q = torch.randn(len(case.step.tokens_T), dims.heads, dims.nope + dims.rope).to(dtype)
    kv_b = torch.randn(dims.heads * (dims.nope + dims.value), dims.latent) * dims.latent**-0.5
    kv_b, record = kv_b.to(dtype), latent_record(dims.latent, dims.rope)
    cache, packed = coded(case.cache, record), ops.pack(PackKind.LATENT, kv_b)
    actual = ops.mla(q, cache, packed, absorbed, expanded, dims, record)
    plain = decoded(cache, record, dtype)
    assert torch.equal(actual, ops.mla(q, plain, packed, absorbed, expanded, dims))
    starts, expected = case.step.host_starts_S1, []
    for index, rows in enumerate(case.rows):
        latent, pe = rows.double().split((dims.latent, dims.rope), dim=1)
        up = (latent @ kv_b.double().T).view(-1, dims.heads, dims.nope + dims.value)
        k = torch.cat((up[..., : dims.nope], pe[:, None].expand(-1, dims.heads, -1)), -1)
        own = q[starts[index] : starts[index + 1]].double()
        expected.append(dense(own, k, up[..., dims.nope :], dims.scale))
    assert 1e-3 < share_of_error(actual, torch.cat(expected).flatten(1)) < MOST_ERROR


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("batch", ["mixed", "decodes", "nested", "equal decodes"])
def test_mla_over_records(backend: str, batch: str, dtype: torch.dtype, form: str) -> None:
    dims = MlaDims(heads=3, nope=16, rope=8, value=24, latent=200, scale=0.1)  # a part of a tile
    case = make_case(batch, 208, dtype, is_shuffled=batch != "equal decodes")
    groups = make_groups(case.step, np.arange(len(case.rows)), dtype)
    both = (groups, NONE) if form == "absorbed" else (NONE, groups)
    check_mla(kernels.load(backend), case, dims, dtype, *both)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("page_tokens", [4, 8, 64])
@pytest.mark.parametrize("batch", BATCHES)
def test_compiled_mla_over_records(compiled: Ops, batch: str, page_tokens: int, form: str) -> None:
    dims = MlaDims(heads=5, nope=32, rope=64, value=96, latent=160, scale=0.1)
    case = make_case(batch, 224, BF16, page_tokens=page_tokens)
    runs = whole_runs(case.step)
    absorbed, expanded = read_in_place(case.step, runs), expanded_first(case.step, runs)
    both = (absorbed, NONE) if form == "absorbed" else (NONE, expanded)
    check_mla(compiled, case, dims, BF16, *both)


def test_heads_have_a_power_of_two_each() -> None:
    """By the table: values of all heads, then their biased exponents; ranks keep slices of it."""
    whole, half = head_record(4, 32), head_record(2, 32)
    assert (whole.num_bytes, half.num_bytes) == (4 * 33, 2 * 33)
    rows = torch.randn(5, 4, 32) * torch.tensor([1.0, 1e4, 1e-6, 3.0])[:, None]
    caches = []
    for record, part in ((whole, rows), (half, rows[:, :2]), (half, rows[:, 2:])):
        cache = torch.zeros(1, 8, record.num_bytes, dtype=torch.uint8)
        slots = torch.tensor([3, 0, 7, 1, 2])
        kernels.load("cpu").sparse.write_record(cache, slots, part.flatten(1), record)
        caches.append(cache[0, slots])
    values, exponents = caches[0][:, :128].reshape(5, 4, 32), caches[0][:, 128:]
    most = rows.abs().amax(dim=2).clamp(min=1e-4)
    assert torch.equal(exponents.int(), 127 + (most / 448).log2().ceil().int())
    back = values.view(torch.float8_e4m3fn).double() * 2.0 ** (exponents.double() - 127)[..., None]
    assert ((back - rows).abs() <= rows.abs() / 16 + 2.0**-31).all()
    for part, at in ((caches[1], slice(0, 2)), (caches[2], slice(2, 4))):
        assert torch.equal(part[:, :64].reshape(5, 2, 32), values[:, at])
        assert torch.equal(part[:, 64:], exponents[:, at])
