"""Cache rows in the interpreter: bit for bit, in any order, nothing beside them touched."""

import pytest
import torch
from triton_case import BOUNDS, error

from batchmla.kernels.ops import RopeLayout
from batchmla.kernels.reference.attention import write as plain_write
from batchmla.kernels.reference.norm import rope as plain_rope
from batchmla.kernels.triton.cache_write import write, write_latent

PAGES, TOKENS = 5, 8


def slots(count: int) -> torch.Tensor:
    return torch.randperm(PAGES * TOKENS)[:count]


@pytest.mark.parametrize("width", [1, 64, 100, 2500])
@pytest.mark.parametrize(
    ("kept", "given"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
                        (torch.float32, torch.float32), (torch.uint8, torch.uint8)], ids=str
)  # fmt: skip
def test_writes_rows(width: int, kept: torch.dtype, given: torch.dtype) -> None:
    cache = (torch.randn(PAGES, TOKENS, width) * 50).to(kept)
    rows = (torch.randn(7, 2 * width) * 50).to(given)[:, width:]
    wanted, places = cache.clone(), slots(7)
    plain_write(wanted, places, rows)
    write(cache, places, rows)
    assert torch.equal(cache, wanted)


def test_rows_with_slots_outside_the_cache_are_skipped() -> None:
    guarded = torch.zeros(PAGES + 2, TOKENS, 64)
    cache, rows = guarded[1:-1], torch.ones(4, 64)
    places = torch.tensor([3, -1, PAGES * TOKENS, 2**40])
    write(cache, places, rows)
    assert cache.view(-1, 64)[3].eq(1).all() and guarded.sum() == 64
    latent = torch.randn(4, 64)
    write_latent(cache, places, latent, torch.ones(48), 1e-6, torch.ones(4, 8), torch.zeros(4, 8))
    cache.view(-1, 64)[3] = 0
    assert not guarded.any()


def test_offsets_beyond_31_bits() -> None:
    """Rows of a cache, and of the input, that lie 2**31 elements apart."""
    far = torch.empty(2**31 + 64, dtype=torch.uint8)
    cache = far.as_strided((2, 1, 64), (2**31, 2**31, 1))
    rows = torch.arange(128, dtype=torch.uint8).view(2, 64)
    write(cache, torch.tensor([0, 1]), rows)
    assert torch.equal(far[:64], rows[0]) and torch.equal(far[2**31 :], rows[1])
    near = torch.zeros(1, 2, 64, dtype=torch.uint8)
    write(near, torch.tensor([0, 1]), cache[:, 0])
    assert torch.equal(near[0], rows)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("width", "rope_width"), [(64, 16), (100, 24), (512, 64)])
def test_latents_are_normed_and_rotated(width: int, rope_width: int, dtype: torch.dtype) -> None:
    total, half = width + rope_width, rope_width // 2
    cache = torch.full((PAGES, TOKENS, total), 7.0, dtype=dtype)
    latent = torch.randn(6, total + 40).to(dtype)[:, 40:]
    weight, turns = torch.randn(width).to(dtype), torch.rand(6, half) * 100
    cos, sin, places = turns.cos(), turns.sin(), slots(6)
    write_latent(cache, places, latent, weight, 1e-6, cos, sin)
    wide = latent[:, :width].double()
    factor = torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
    pe = latent[:, None, width:].double()
    plain_rope(pe, cos, sin, RopeLayout.INTERLEAVED)
    flat = cache.view(-1, total)
    assert error(flat[places, :width], wide * factor * weight.double()) <= BOUNDS[dtype]
    assert error(flat[places, width:], pe[:, 0]) <= BOUNDS[dtype]
    flat[places] = 7.0
    assert (cache == 7).all(), "another row was written"


def test_latents_are_rounded_as_the_model_is_before_the_cache() -> None:
    latent, weight = torch.randn(3, 80).bfloat16(), torch.randn(64).bfloat16()
    turns, places = torch.rand(3, 8), torch.tensor([2, 0, 1])
    wide, narrow = torch.zeros(1, 3, 80), torch.zeros(1, 3, 80).bfloat16()
    for cache in (wide, narrow):
        write_latent(cache, places, latent, weight, 1e-6, turns.cos(), turns.sin())
    assert torch.equal(wide, narrow.float())


def test_a_latent_does_not_depend_on_others() -> None:
    latent, weight = torch.randn(5, 80), torch.randn(64)
    turns = torch.rand(5, 8)
    whole, alone = torch.zeros(1, 5, 80), torch.zeros(1, 1, 80)
    write_latent(whole, torch.arange(5), latent, weight, 1e-6, turns.cos(), turns.sin())
    part = slice(3, 4)
    write_latent(alone, torch.tensor([0]), latent[part], weight, 1e-6, turns[part].cos(),
                 turns[part].sin())  # fmt: skip
    assert torch.equal(whole[0, 3], alone[0, 0])
