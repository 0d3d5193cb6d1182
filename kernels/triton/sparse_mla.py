"""Latent attention of each row over its own cached rows, in latent space.

One program has a row and a block of heads and goes through the row's slots, a tile of gathered
rows at a time; a tile is key and value in one. Few heads stand on the second axis of the products
(keys on the first), many on the first. A row's keys are never split, so its result does not depend
on the rows beside it. N rows, H heads, C latent width, R rope width, K slots.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchmla.kernels.sparse_ops import Record
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.index_scores import coded, dot_block, plain_e4m3

LOG2_E = 1.4426950408889634
FEW_HEADS = 32


@triton.jit
def fold(scores, most, total, AXIS: tl.constexpr):
    """One more tile of scores, in base 2, along AXIS: its weights, the factor of what came before,
    the largest score and the sum of weights so far."""
    highest = tl.maximum(most, tl.max(scores, axis=AXIS))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    factor = tl.exp2(most - base)
    weights = tl.exp2(scores - tl.expand_dims(base, AXIS))
    return weights, factor, highest, total * factor + tl.sum(weights, axis=AXIS)


@triton.jit
def attend_tile(scores, rows, seen, most, total, acc, IS_SWAPPED: tl.constexpr):
    """Scores of a tile's rows, [keys, heads] if swapped, and what the rows add to the results."""
    if IS_SWAPPED:
        scores = tl.where(seen[:, None], scores, float("-inf"))
        weights, factor, most, total = fold(scores, most, total, 0)
        acc = tl.dot(
            tl.trans(rows), weights.to(rows.dtype), acc * factor[None, :], input_precision="ieee"
        )
    else:
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, factor, most, total = fold(scores, most, total, 1)
        acc = tl.dot(weights.to(rows.dtype), rows, acc * factor[:, None], input_precision="ieee")
    return most, total, acc


@triton.jit
def add_dots(scores, q, rows, IS_SWAPPED: tl.constexpr):
    """Scores plus q · row, [keys, heads] if swapped."""
    if IS_SWAPPED:
        scores = tl.dot(rows, tl.trans(q), scores, input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(rows), scores, input_precision="ieee")
    return scores


@triton.jit
def within(rows, columns, WIDTH: tl.constexpr):
    """Mask of some rows' first WIDTH columns."""
    if columns.shape[0] == WIDTH:
        mask = rows[:, None]
    else:
        mask = rows[:, None] & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def row_starts(slots, page_stride, row_stride, PAGE: tl.constexpr):
    """Offsets of flat cache rows."""
    return (slots // PAGE) * page_stride + (slots % PAGE) * row_stride


@triton.jit
def scaled(codes, factors, dtype: tl.constexpr, TILE: tl.constexpr):
    """e4m3 [keys, width] times a power of two for every TILE of them, in `dtype`."""
    KEYS: tl.constexpr = codes.shape[0]
    WIDTH: tl.constexpr = codes.shape[1]
    wide: tl.constexpr = tl.float32 if dtype == tl.float16 else dtype
    values = tl.reshape(plain_e4m3(codes, wide), [KEYS, WIDTH // TILE, TILE])
    return tl.reshape(values * factors.to(wide)[:, :, None], [KEYS, WIDTH]).to(dtype)


@triton.jit
def _sparse_mla_kernel(
    q, q_pe, cache, scales, tails, slots, out,
    count, num_heads, scale,
    q_stride, q_head_stride, pe_stride, pe_head_stride, page_stride, row_stride,
    out_stride, out_head_stride,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_LATENT: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, IS_SWAPPED: tl.constexpr,
    TILE: tl.constexpr, SCALE_AT: tl.constexpr, TAIL_AT: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(num_heads, HEADS)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    heads = (tl.program_id(0) % num_blocks) * HEADS + tl.arange(0, HEADS)
    latent, rope = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_ROPE)
    is_head = heads < num_heads
    dtype = q.dtype.element_ty
    q_tile = tl.load(
        q + row * q_stride + heads.to(tl.int64)[:, None] * q_head_stride + latent[None, :],
        mask=within(is_head, latent, LATENT), other=0.0,
    )  # fmt: skip
    pe_tile = tl.load(
        q_pe + row * pe_stride + heads.to(tl.int64)[:, None] * pe_head_stride + rope[None, :],
        mask=within(is_head, rope, ROPE), other=0.0,
    )  # fmt: skip
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if IS_SWAPPED:
        acc = tl.zeros([BLOCK_LATENT, HEADS], tl.float32)
    else:
        acc = tl.zeros([HEADS, BLOCK_LATENT], tl.float32)
    keys = tl.arange(0, KEYS)
    slots += row * count
    slot = tl.load(slots + keys, mask=keys < count, other=-1)
    for start in range(0, count, KEYS):
        seen = slot >= 0
        at = row_starts(slot, page_stride, row_stride, PAGE)
        is_value = within(seen, latent, LATENT)
        values = tl.load(cache + at[:, None] + latent[None, :], mask=is_value, other=0.0)
        is_tail = within(seen, rope, ROPE)
        if TILE > 0:
            tail = tl.load(
                tails + (at // 2)[:, None] + TAIL_AT + rope[None, :], mask=is_tail, other=0.0
            ).to(dtype)
            tiles = tl.arange(0, BLOCK_LATENT // TILE)
            factors = tl.load(
                scales + (at // 4)[:, None] + SCALE_AT + tiles[None, :],
                mask=seen[:, None] & (tiles * TILE < LATENT)[None, :], other=0.0,
            )  # fmt: skip
            values = scaled(values, factors, dtype, TILE)
        else:
            tail = tl.load(
                cache + at[:, None] + LATENT + rope[None, :], mask=is_tail, other=0.0
            ).to(dtype)
            values = values.to(dtype)
        following = start + KEYS + keys
        slot = tl.load(slots + following, mask=following < count, other=-1)
        if IS_SWAPPED:
            scores = tl.zeros([KEYS, HEADS], tl.float32)
        else:
            scores = tl.zeros([HEADS, KEYS], tl.float32)
        scores = add_dots(scores, q_tile, values, IS_SWAPPED)
        scores = add_dots(scores, pe_tile, tail, IS_SWAPPED)
        most, total, acc = attend_tile(scores * scale, values, seen, most, total, acc, IS_SWAPPED)
    total = tl.where(total == 0.0, 1.0, total)
    out_at = row * out_stride + heads.to(tl.int64) * out_head_stride
    is_out = within(heads < num_heads, latent, LATENT)
    if IS_SWAPPED:
        acc = acc / total[None, :]
        tl.store(out + out_at[None, :] + latent[:, None], acc.to(dtype), mask=tl.trans(is_out))
    else:
        acc = acc / total[:, None]
        tl.store(out + out_at[:, None] + latent[None, :], acc.to(dtype), mask=is_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How many heads and keys a program takes at a time, and the shape of its products."""

    heads: int
    keys: int
    is_swapped: bool
    num_warps: int = 8
    num_stages: int = 2

    @property
    def launch(self) -> dict[str, int | bool]:
        """Constants and options of a launch."""
        return {
            "HEADS": self.heads, "KEYS": self.keys, "IS_SWAPPED": self.is_swapped,
            "num_warps": self.num_warps, "num_stages": self.num_stages,
        }  # fmt: skip


def choose_tile(num_heads: int, is_record: bool, like: torch.Tensor) -> Tile:
    """Of rows of about 512 elements: by what registers and shared memory of sm_90 hold; elsewhere,
    and in float32, by the least of both."""
    is_hopper = like.device.type != "cuda" or torch.cuda.get_device_capability(like.device)[0] == 9
    if like.dtype == torch.float32:
        return WIDE_TILE
    if num_heads <= FEW_HEADS or not is_hopper:
        heads = 16 if num_heads <= 16 else FEW_HEADS
        keys = 32 if is_record or not is_hopper else 64
        return Tile(heads=heads, keys=keys, is_swapped=True)
    return Tile(heads=64, keys=16 if is_record else 32, is_swapped=False, num_stages=3)


WIDE_TILE = Tile(heads=16, keys=16, is_swapped=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRows:
    """Cached rows of C + R elements, or views of the parts of records that stand for them; of
    records strides are in bytes."""

    values: torch.Tensor
    scales: torch.Tensor | None = None
    tails: torch.Tensor | None = None
    tile: int = 0
    scale_at: int = 0  # elements from the start of a row
    tail_at: int = 0

    @staticmethod
    def of(cache_PBX: torch.Tensor, record: Record | None) -> "LatentRows":
        """Of a paged cache."""
        assert cache_PBX.stride(2) == 1, f"rows of strides {cache_PBX.stride()}"
        if record is None:
            return LatentRows(values=cache_PBX)
        is_within = not record.scales_last and not record.has_e8m0 and not record.pad
        assert is_within and not record.tile & (record.tile - 1), f"no latent record: {record}"
        return LatentRows(
            values=coded(cache_PBX), scales=cache_PBX.view(torch.float32),
            tails=cache_PBX.view(torch.bfloat16),
            tile=min(record.tile, dot_block(record.values)), scale_at=record.values // 4,
            tail_at=(record.values + record.scale_bytes) // 2,
        )  # fmt: skip


def attend_slots(
    q_NHC: torch.Tensor,
    q_NHR: torch.Tensor,
    rows: LatentRows,
    slots_NK: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Σ softmax(scale · (q · latent + q · rope)) latent → [H, N, C]; slots below 0 are left out."""
    num_rows, num_heads, latent = q_NHC.shape
    rope = q_NHR.shape[2]
    assert q_NHC.stride(2) == 1 and q_NHR.stride(2) == 1 and slots_NK.is_contiguous()
    assert q_NHR.dtype == q_NHC.dtype, f"queries of {q_NHC.dtype} and {q_NHR.dtype}"
    out_HNC = q_NHC.new_empty(num_heads, num_rows, latent)
    tile = choose_tile(num_heads, rows.tile > 0, q_NHC)
    _sparse_mla_kernel[(num_rows * triton.cdiv(num_heads, tile.heads),)](
        q_NHC, q_NHR, rows.values, rows.scales, rows.tails, slots_NK, out_HNC,
        slots_NK.shape[1], num_heads, scale * LOG2_E,
        q_NHC.stride(0), q_NHC.stride(1), q_NHR.stride(0), q_NHR.stride(1),
        rows.values.stride(0), rows.values.stride(1), out_HNC.stride(1), out_HNC.stride(0),
        LATENT=latent, ROPE=rope, BLOCK_LATENT=dot_block(latent), BLOCK_ROPE=dot_block(rope),
        PAGE=rows.values.shape[1], TILE=rows.tile, SCALE_AT=rows.scale_at, TAIL_AT=rows.tail_at,
        **tile.launch,
    )  # fmt: skip
    return out_HNC


def _case(
    name: str, tile: Tile, targets: tuple[int, ...], codes: str | None = None, dtype: str = "*bf16"
) -> AotCase:
    """512 + 64 elements and pages of 64, as in DeepSeek-V3.2."""
    types = dict.fromkeys(("q", "q_pe", "out"), dtype) | {
        "cache": codes or dtype, "slots": "*i64", "count": "i32", "num_heads": "i32",
        "scale": "fp32", **dict.fromkeys(_STRIDES, "i32"),
    }  # fmt: skip
    parts = {"scales": "*fp32", "tails": "*bf16"}
    sizes = {"TILE": 128, "SCALE_AT": 128, "TAIL_AT": 264} if codes else {}
    absent = {} if codes else dict.fromkeys(("scales", "tails"))
    constants = {
        "LATENT": 512, "ROPE": 64, "BLOCK_LATENT": 512, "BLOCK_ROPE": 64, "PAGE": 64, "TILE": 0,
        "SCALE_AT": 0, "TAIL_AT": 0, "HEADS": tile.heads, "KEYS": tile.keys,
        "IS_SWAPPED": tile.is_swapped, **sizes, **absent,
    }  # fmt: skip
    if codes:
        types |= parts
    return AotCase(
        name=f"sparse mla {name}", kernel=_sparse_mla_kernel, types=types, constants=constants,
        aligned=tuple(name for name in types if name not in ("scale", "num_heads")),
        num_warps=tile.num_warps, num_stages=tile.num_stages, targets=targets,
        requires=("HGMMA", "LDGSTS") if dtype == "*bf16" else (),
    )  # fmt: skip


_STRIDES = ("q_stride", "q_head_stride", "pe_stride", "pe_head_stride", "page_stride",
            "row_stride", "out_stride", "out_head_stride")  # fmt: skip
_SWAPPED = Tile(heads=16, keys=32, is_swapped=True)
_SWAPPED_32 = Tile(heads=FEW_HEADS, keys=32, is_swapped=True)
AOT_CASES = (
    _case("bf16 16 heads", Tile(heads=16, keys=64, is_swapped=True), (90,)),
    _case("bf16 64 heads", Tile(heads=64, keys=32, is_swapped=False, num_stages=3), (90,)),
    _case("e4m3 16 heads", _SWAPPED, (90,), "*fp8e4nv"),
    _case("e4m3 64 heads", Tile(heads=64, keys=16, is_swapped=False, num_stages=3), (90,),
          "*fp8e4nv"),
    _case("bf16 16 heads elsewhere", _SWAPPED, (80, 100)),
    _case("bf16 32 heads elsewhere", _SWAPPED_32, (80, 100)),
    _case("e4m3 16 heads for sm_80", _SWAPPED, (80,), "*u8"),
    _case("e4m3 32 heads for sm_80", _SWAPPED_32, (80,), "*u8"),
    _case("e4m3 16 heads for sm_100", _SWAPPED, (100,), "*fp8e4nv"),
    _case("e4m3 32 heads for sm_100", _SWAPPED_32, (100,), "*fp8e4nv"),
    _case("f32", WIDE_TILE, (90,), dtype="*fp32"),
)  # fmt: skip
