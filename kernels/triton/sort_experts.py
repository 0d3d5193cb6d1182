"""Choices in the order of their experts, and the tiles of rows that products go over. X choices
(T*A), E experts, N tiles.

A stable counting sort without a word to the host: blocks of choices are counted by expert, the
counts are summed over the blocks before, and each choice is placed by its rank in its block. Ids
outside 0..E-1 are left out. A tile is one expert's next `tile_rows` places; as their number is not
known on the host there are as many as could be needed, and those in excess have expert -1.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase

BLOCK_X = 128  # choices of a block
BLOCK_E = 16  # experts whose counts one program sums
BLOCK_B = 256  # blocks summed at a time
NUM_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """`order_X` has the choices, expert by expert, each expert's in their own order; those of
    expert e end before place `ends_E[e]`. Tile n has places from `first_N[n]` on. All int32."""

    order_X: torch.Tensor
    ends_E: torch.Tensor
    expert_N: torch.Tensor
    first_N: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """As the kernels take them."""
        return (self.order_X, self.ends_E, self.expert_N, self.first_N)

    @property
    def num_choices(self) -> int:
        return len(self.order_X)

    @property
    def num_tiles(self) -> int:
        return len(self.expert_N)


@triton.jit
def _load_ids(ids, numbers, num_choices, num_experts):
    found = tl.load(ids + numbers, mask=numbers < num_choices, other=-1)
    return tl.where((found >= 0) & (found < num_experts), found, -1).to(tl.int32)


@triton.jit
def _count_kernel(
    ids, counts, num_choices, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):
    """Counts [blocks, EXPERTS]."""
    block = tl.program_id(0)
    found = _load_ids(ids, block * BLOCK + tl.arange(0, BLOCK), num_choices, num_experts)
    is_known = found >= 0
    total = tl.histogram(tl.where(is_known, found, 0), EXPERTS, mask=is_known)
    tl.store(counts + block * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit
def _sum_kernel(
    counts, totals, num_blocks, EXPERTS: tl.constexpr, SOME: tl.constexpr, BLOCKS: tl.constexpr
):
    """Turns counts into the sums of the blocks before, in place; totals [EXPERTS]."""
    expert = tl.program_id(0) * SOME + tl.arange(0, SOME)
    before = tl.zeros([SOME], tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)[:, None]
        places, inside = counts + block * EXPERTS + expert[None, :], block < num_blocks
        some = tl.load(places, mask=inside, other=0)
        tl.store(places, tl.cumsum(some, axis=0) - some + before[None, :], mask=inside)
        before += tl.sum(some, axis=0)
    tl.store(totals + expert, before)


@triton.jit
def _place_kernel(
    ids, counts, totals, order, ends, tile_expert, tile_first, num_choices, num_experts,
    num_blocks, num_tiles, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.load(totals + expert)
    tiles = (total + TILE_ROWS - 1) // TILE_ROWS
    if program < num_blocks:
        starts = tl.cumsum(total, axis=0) - total
        number = program * BLOCK + tl.arange(0, BLOCK)
        found = _load_ids(ids, number, num_choices, num_experts)
        others = program * BLOCK + tl.arange(0, BLOCK)
        other = _load_ids(ids, others, num_choices, num_experts)
        is_before = (found[:, None] == other[None, :]) & (others[None, :] < number[:, None])
        rank = tl.sum(is_before.to(tl.int32), axis=1)
        known = tl.where(found >= 0, found, 0)
        place = tl.gather(starts, known, axis=0) + rank
        place += tl.load(counts + program * EXPERTS + known)
        tl.store(order + place, number, mask=found >= 0)
    if program < num_experts:
        start = tl.sum(tl.where(expert < program, total, 0), axis=0)
        first_tile = tl.sum(tl.where(expert < program, tiles, 0), axis=0)
        own = tl.sum(tl.where(expert == program, total, 0), axis=0)
        tl.store(ends + program, start + own)
        own_tiles = (own + TILE_ROWS - 1) // TILE_ROWS
        for first in range(0, own_tiles, BLOCK):
            tile = first + tl.arange(0, BLOCK)
            inside = tile < own_tiles
            same = tl.zeros([BLOCK], tl.int32) + program
            tl.store(tile_expert + first_tile + tile, same, mask=inside)
            tl.store(tile_first + first_tile + tile, start + tile * TILE_ROWS, mask=inside)
    if program == num_experts - 1:
        for first in range(tl.sum(tiles, axis=0), num_tiles, BLOCK):
            tile = first + tl.arange(0, BLOCK)
            none = tl.full([BLOCK], -1, tl.int32)
            tl.store(tile_expert + tile, none, mask=tile < num_tiles)
            tl.store(tile_first + tile, none, mask=tile < num_tiles)


def max_tiles(num_choices: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that so many choices can need."""
    return num_choices // tile_rows + min(num_choices, num_experts)


def sort_experts(ids_TA: torch.Tensor, num_experts: int, tile_rows: int) -> Tiles:
    """Of int64 ids [T, A], at least one."""
    num_choices, device = ids_TA.numel(), ids_TA.device
    assert num_choices, "there is nothing to sort"
    experts = max(triton.next_power_of_2(num_experts), BLOCK_E)
    num_blocks = triton.cdiv(num_choices, BLOCK_X)
    num_tiles = max_tiles(num_choices, num_experts, tile_rows)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    counts_BE, totals_E = ints(num_blocks, experts), ints(experts)
    tiles = Tiles(
        order_X=ints(num_choices), ends_E=ints(num_experts), expert_N=ints(num_tiles),
        first_N=ints(num_tiles),
    )  # fmt: skip
    ids_X = ids_TA.contiguous()
    _count_kernel[(num_blocks,)](
        ids_X, counts_BE, num_choices, num_experts, BLOCK=BLOCK_X, EXPERTS=experts,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    _sum_kernel[(experts // BLOCK_E,)](
        counts_BE, totals_E, num_blocks, EXPERTS=experts, SOME=BLOCK_E, BLOCKS=BLOCK_B,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    _place_kernel[(max(num_blocks, num_experts),)](
        ids_X, counts_BE, totals_E, tiles.order_X, tiles.ends_E, tiles.expert_N, tiles.first_N,
        num_choices, num_experts, num_blocks, num_tiles,
        TILE_ROWS=tile_rows, BLOCK=BLOCK_X, EXPERTS=experts, num_warps=NUM_WARPS,
    )  # fmt: skip
    return tiles


_TENSORS = {
    "ids": "*i64", "counts": "*i32", "totals": "*i32", "order": "*i32", "ends": "*i32",
    "tile_expert": "*i32", "tile_first": "*i32",
}  # fmt: skip


def _case(name: str, kernel: triton.JITFunction, **constants: int) -> AotCase:
    arguments = {name: _TENSORS.get(name, "i32") for name in kernel.arg_names}
    return AotCase(
        name=name,
        kernel=kernel,
        types={name: kind for name, kind in arguments.items() if name not in constants},
        constants=constants,
        aligned=tuple(name for name in arguments if name in _TENSORS),
        num_warps=NUM_WARPS,
    )


AOT_CASES = tuple(
    case
    for experts in (64, 512)
    for case in (
        _case(f"count experts {experts}", _count_kernel, BLOCK=BLOCK_X, EXPERTS=experts),
        _case(f"sum counts {experts}", _sum_kernel, EXPERTS=experts, SOME=BLOCK_E, BLOCKS=BLOCK_B),
        _case(
            f"place choices {experts}", _place_kernel, TILE_ROWS=64, BLOCK=BLOCK_X, EXPERTS=experts
        ),
    )
)
