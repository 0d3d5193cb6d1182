"""Products of sorted tokens with their experts' matrices, 16 or 32 bits a value, summed in float32.

T tokens, X choices, E experts, M model width, F ffn width. Two products make an expert: up, whose
gates and ups are activated before they are rounded, and down. All output tiles of a tile of tokens
are neighbours in the grid, so that its rows, and an expert's matrix, are read from the cache again.

The first product ("up") reads the rows of tokens and writes at the places of their choices, once
sorted; the second ("down") reads at places and writes at the choices, so that a token's rows end up
side by side. Rows beyond an expert's last repeat it and are not written.
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.act_mul import Act, Activation, activate
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.expert_products import ExpertProducts
from batchmla.kernels.triton.expert_tiles import MANY, TileShape, boxes
from batchmla.kernels.triton.sort_experts import Tiles


def up_shape(tokens: int, dtype: torch.dtype) -> TileShape:
    """Of tiles with so many rows."""
    return _shape(tokens, dtype, 128 if tokens == MANY else 64)


def down_shape(tokens: int, dtype: torch.dtype) -> TileShape:
    """As `up_shape`."""
    return _shape(tokens, dtype, 256 if tokens == MANY else 128)


def _shape(tokens: int, dtype: torch.dtype, outputs: int) -> TileShape:
    if dtype == torch.float32:
        return TileShape(
            block_t=tokens, block_o=64, block_k=32, is_swapped=True, num_warps=4, num_stages=2
        )
    is_many = tokens == MANY
    return TileShape(
        block_t=tokens, block_o=outputs, block_k=64, is_swapped=not is_many,
        num_warps=8 if is_many else 4, num_stages=3 if is_many else 4,
    )  # fmt: skip


@triton.jit
def rows_of(
    order, ends, tile_first, tile, expert, active, IS_UP: tl.constexpr, BLOCK_T: tl.constexpr
):
    """(rows read, rows written, whether they are), the rows int64."""
    end = tl.load(ends + expert)
    places = tl.load(tile_first + tile) + tl.arange(0, BLOCK_T)
    inside = places < end
    places = tl.minimum(places, end - 1)
    choices = tl.load(order + places)
    if IS_UP:
        read, written = choices // active, places
    else:
        read, written = places, choices
    return read.to(tl.int64), written.to(tl.int64), inside


@triton.jit
def store_tile(
    out, stride, written, inside, result, first_output, outputs, IS_SWAPPED: tl.constexpr,
    BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Rounds and writes [T, O], or [O, T] if swapped."""
    if IS_SWAPPED:
        result = tl.trans(result)
    output = first_output + tl.arange(0, BLOCK_O)
    places = out + written[:, None] * stride + output[None, :]
    mask = inside[:, None] & (output < outputs)[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weight_tile(weight, box_row, rows, start, k, inputs, HAS_BOXES: tl.constexpr,
                 IS_EVEN: tl.constexpr):  # fmt: skip
    """[O, K]; what lies beyond the inputs is 0."""
    if HAS_BOXES:
        tile = weight.load([box_row, start])
    elif IS_EVEN:
        tile = tl.load(rows + start)
    else:
        tile = tl.load(rows + start, mask=(start + k < inputs)[None, :], other=0.0)
    return tile


@triton.jit
def _add_product(total, x, weight, IS_SWAPPED: tl.constexpr):
    """`total` + x Wᵀ, or its transpose."""
    if IS_SWAPPED:
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    return total


@triton.jit
def _gemm_kernel(
    x, weight, out, order, ends, tile_expert, tile_first, x_stride, out_stride, expert_rows,
    inputs, outputs, active, limit, alpha,
    ACT: tl.constexpr, HAS_BOXES: tl.constexpr, IS_EVEN: tl.constexpr, IS_SWAPPED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    IS_UP: tl.constexpr = ACT != 0
    parts = tl.cdiv(outputs, BLOCK_O)
    tile = tl.program_id(0) // parts
    first_output = tl.program_id(0) % parts * BLOCK_O
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    read, written, inside = rows_of(order, ends, tile_first, tile, expert, active, IS_UP, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + read[:, None] * x_stride + k[None, :]
    box_row = expert * expert_rows + first_output
    gate_rows = weight
    up_rows = weight
    if not HAS_BOXES:
        output = tl.minimum(first_output + tl.arange(0, BLOCK_O), outputs - 1)
        row = expert.to(tl.int64) * expert_rows + output
        gate_rows = weight + row[:, None] * inputs + k[None, :]
        up_rows = weight + (row + outputs)[:, None] * inputs + k[None, :]
    if IS_SWAPPED:
        gates = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    else:
        gates = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    ups = gates
    for start in range(0, inputs, BLOCK_K):
        if IS_EVEN:
            rows = tl.load(x_rows + start)
        else:
            rows = tl.load(x_rows + start, mask=(start + k < inputs)[None, :], other=0.0)
        gate = _weight_tile(weight, box_row, gate_rows, start, k, inputs, HAS_BOXES, IS_EVEN)
        gates = _add_product(gates, rows, gate, IS_SWAPPED)
        if IS_UP:
            up = _weight_tile(
                weight, box_row + outputs, up_rows, start, k, inputs, HAS_BOXES, IS_EVEN
            )
            ups = _add_product(ups, rows, up, IS_SWAPPED)
    result = gates
    if IS_UP:
        result = activate(gates, ups, limit, alpha, ACT)
    store_tile(out, out_stride, written, inside, result, first_output, outputs, IS_SWAPPED, BLOCK_O)


def _launch(
    x: torch.Tensor,
    weight_EOI: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles,
    active: int,
    activation: Activation,
    shape: TileShape,
) -> None:
    inputs, outputs = x.shape[1], out.shape[1]
    assert weight_EOI.shape[2] == inputs, f"{tuple(weight_EOI.shape)} for {inputs} inputs"
    assert weight_EOI.is_contiguous(), f"a strided weight of shape {tuple(weight_EOI.shape)}"
    if x.stride(1) != 1:
        x = x.contiguous()
    weight = boxes(weight_EOI, shape)
    grid = (tiles.num_tiles * triton.cdiv(outputs, shape.block_o),)
    _gemm_kernel[grid](
        x, weight, out, tiles.order_X, tiles.ends_E, tiles.expert_N, tiles.first_N, x.stride(0),
        out.stride(0), weight_EOI.shape[1], inputs, outputs, active, float(activation.limit),
        float(activation.alpha),
        ACT=int(activation.act), HAS_BOXES=not isinstance(weight, torch.Tensor),
        IS_EVEN=inputs % shape.block_k == 0, IS_SWAPPED=shape.is_swapped, BLOCK_T=shape.block_t,
        BLOCK_O=shape.block_o, BLOCK_K=shape.block_k, num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )  # fmt: skip


_PRODUCTS = ExpertProducts(_launch)
up_product, down_product = _PRODUCTS.up, _PRODUCTS.down


_TYPES = dict.fromkeys(("order", "ends", "tile_expert", "tile_first"), "*i32") | dict.fromkeys(
    ("x_stride", "out_stride", "expert_rows", "inputs", "outputs", "active"), "i32"
)


def _case(
    dtype: torch.dtype, shape: TileShape, act: Act, *, has_boxes: bool, targets: tuple[int, ...]
) -> AotCase:
    kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    box = f"tensordesc<{kind}[{shape.block_o},{shape.block_k}]>"
    is_wide = dtype == torch.float32
    return AotCase(
        name=f"experts {kind} {'up' if act else 'down'}, {shape.block_t} tokens"
        + ("" if has_boxes else ", no boxes"),
        kernel=_gemm_kernel,
        types=_TYPES
        | {"x": f"*{kind}", "out": f"*{kind}", "weight": box if has_boxes else f"*{kind}"}
        | {"limit": "fp32", "alpha": "fp32"},
        constants={
            "ACT": int(act), "HAS_BOXES": has_boxes, "IS_EVEN": True,
            "IS_SWAPPED": shape.is_swapped, "BLOCK_T": shape.block_t, "BLOCK_O": shape.block_o,
            "BLOCK_K": shape.block_k,
        },
        aligned=(
            "x", "out", "order", "ends", "x_stride", "out_stride", "expert_rows", "inputs",
            "outputs", *(() if has_boxes else ("weight",)),
        ),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        requires=() if is_wide else ("HGMMA", "LDGSTS", *(("UTMALDG",) if has_boxes else ())),
        targets=targets,
    )  # fmt: skip


_BF16, _F32 = torch.bfloat16, torch.float32
AOT_CASES = (
    *(
        _case(_BF16, up_shape(tokens, _BF16), Act.SILU, has_boxes=True, targets=targets)
        for tokens, targets in ((16, (90, 100)), (32, (90,)), (64, (90,)), (128, (90, 100)))
    ),
    *(
        _case(_BF16, down_shape(tokens, _BF16), Act.NONE, has_boxes=True, targets=targets)
        for tokens, targets in ((16, (90, 100)), (64, (90,)), (128, (90,)))
    ),
    _case(_BF16, up_shape(32, _BF16), Act.OAI, has_boxes=False, targets=(80, 90)),
    _case(_BF16, down_shape(128, _BF16), Act.NONE, has_boxes=False, targets=(80,)),
    _case(_F32, up_shape(16, _F32), Act.SILU, has_boxes=True, targets=(90,)),
)
