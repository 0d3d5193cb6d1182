"""Paged attention of both back ends against dense float64 attention."""

import numpy as np
import pytest
import torch
from compare import assert_close
from paged_case import BATCHES, PAGE_TOKENS, dense, make_case

from batchmla import kernels
from batchmla.attention.groups import MAX_DECODE_GROUPS, make_groups, split_by_length
from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import MlaDims, PackKind

NUM_PREFIXES = {
    "decodes behind one prefix": 1, "chunks behind one prefix": 1, "nested": 2, "two prefixes": 2
}  # fmt: skip
EVERY = [
    pytest.param(backend, dtype, batch, id=f"{backend}-{str(dtype)[6:]}-{batch.replace(' ', '_')}")
    for backend in ("cpu", "reference")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for batch in BATCHES
    if backend == "cpu" or dtype != torch.float16
]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("backend", "dtype", "batch"), EVERY)
def test_gqa(backend: str, dtype: torch.dtype, batch: str, heads: int, kv_heads: int) -> None:
    head_dim = 16
    case = make_case(batch, 2 * kv_heads * head_dim, dtype, is_shuffled=heads != 3)
    key, value = (half.contiguous() for half in case.cache.chunk(2, dim=-1))
    q = torch.randn(len(case.step.tokens_T), heads, head_dim).to(dtype)
    groups = make_groups(case.step, np.arange(len(case.rows)), dtype)
    assert len(groups.prefixes) == NUM_PREFIXES.get(batch, 0)
    actual = kernels.load(backend).gqa(q, key, value, groups, 0.3)
    expected = []
    starts = case.step.host_starts_S1
    for index, rows in enumerate(case.rows):
        k, v = (
            half.double().view(-1, kv_heads, head_dim).repeat_interleave(heads // kv_heads, 1)
            for half in rows.chunk(2, dim=-1)
        )
        expected.append(dense(q[starts[index] : starts[index + 1]].double(), k, v, 0.3))
    assert_close("gqa", actual, torch.cat(expected).flatten(1))


@pytest.mark.parametrize("form", ["absorbed", "expanded", "both"])
@pytest.mark.parametrize(("backend", "dtype", "batch"), EVERY)
def test_mla(backend: str, dtype: torch.dtype, batch: str, form: str) -> None:
    value = {"absorbed": 16, "expanded": 40, "both": 24}[form]  # narrower, wider, as wide as keys
    dims = MlaDims(heads=3, nope=16, rope=8, value=value, latent=32, scale=0.2)
    case = make_case(batch, dims.latent + dims.rope, dtype, is_shuffled=form != "both")
    everyone = np.arange(len(case.rows))
    halves = {"absorbed": everyone, "expanded": everyone[:0], "both": everyone[::2]}[form]
    absorbed = make_groups(case.step, halves, dtype)
    expanded = make_groups(case.step, np.setdiff1d(everyone, halves), dtype)
    q = torch.randn(len(case.step.tokens_T), 3, 24).to(dtype)
    kv_b = (torch.randn(3 * (16 + value), 32) * 32**-0.5).to(dtype)
    ops = kernels.load(backend)
    actual = ops.mla(q, case.cache, ops.pack(PackKind.LATENT, kv_b), absorbed, expanded, dims)
    expected = []
    starts = case.step.host_starts_S1
    for index, rows in enumerate(case.rows):
        latent, pe = rows.double().split((32, 8), dim=1)
        up = (latent @ kv_b.double().T).view(-1, 3, 16 + value)
        k = torch.cat((up[..., :16], pe[:, None].expand(-1, 3, -1)), -1)
        own = q[starts[index] : starts[index + 1]].double()
        expected.append(dense(own, k, up[..., 16:], dims.scale))
    assert_close("mla", actual, torch.cat(expected).flatten(1), scale=2)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_write_touches_its_slots_only(backend: str) -> None:
    ops = kernels.load(backend)
    cache = torch.full((5, PAGE_TOKENS, 12), float("nan"))
    slots = torch.tensor([39, 0, 17])
    rows = torch.randn(3, 24)[:, ::2]
    ops.write(cache, slots, rows)
    flat = cache.view(-1, 12)
    assert torch.equal(flat[slots], rows)
    assert int(flat.isnan().all(dim=1).sum()) == 37
    half = torch.zeros(5, PAGE_TOKENS, 12, dtype=torch.bfloat16)
    ops.write(half, slots, rows)
    assert torch.equal(half.view(-1, 12)[slots], rows.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_write_latent_is_norm_then_rope_then_write(backend: str, dtype: torch.dtype) -> None:
    ops = kernels.load(backend)
    source = torch.randn(3, 50).to(dtype)
    latent = source[:, 10:]  # [T, 32 + 8], as a slice of a wider product
    weight = torch.rand(32).to(dtype)
    angles = torch.randn(3, 4)
    cache = torch.zeros(2, PAGE_TOKENS, 40, dtype=dtype)
    before = source.clone()
    ops.write_latent(
        cache, torch.tensor([3, 15, 0]), latent, weight, 1e-6, angles.cos(), angles.sin()
    )
    assert torch.equal(source, before), "the input is not the op's to change"
    c, pe = before[:, 10:].double().split((32, 8), dim=1)
    normed = weight.double() * c / (c.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    turned = torch.complex(pe[:, 0::2], pe[:, 1::2]) * torch.exp(1j * angles.double())
    expected = torch.cat((normed, torch.stack((turned.real, turned.imag), -1).flatten(1)), 1)
    assert_close("row", cache.view(-1, 40)[[3, 15, 0]], expected)


def test_buckets_cover_every_decode_and_save_padding() -> None:
    lengths = np.array([2000] + [10] * 40 + [500] * 9 + [30] * 30)
    np.random.default_rng(0).shuffle(lengths)
    buckets = split_by_length(np.arange(100, 180), lengths)
    assert len(buckets) <= MAX_DECODE_GROUPS
    assert sorted(np.concatenate(buckets).tolist()) == list(range(100, 180))
    padded = sum(len(bucket) * int(lengths[bucket - 100].max()) for bucket in buckets)
    assert padded < 1.5 * lengths.sum() < 80 * lengths.max()
    assert len(split_by_length(np.arange(3), np.array([5, 5, 5]))) == 1
    assert len(split_by_length(np.arange(64), np.arange(64) % 8 + 900)) == 1
    many = np.arange(1, 301) * 7
    covered = np.concatenate(split_by_length(np.arange(300), many))
    assert sorted(covered.tolist()) == list(range(300))


def test_groups_without_sequences_are_empty() -> None:
    case = make_case("mixed", 4, torch.float32)
    groups = make_groups(case.step, np.arange(0), torch.float32)
    assert isinstance(groups, Groups) and groups.members == ()
