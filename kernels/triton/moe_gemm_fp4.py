"""Products of sorted tokens with experts in e2m1 that have a power of two for every 32 inputs.

T tokens, X choices, E experts, O outputs, K inputs, two to a byte. Values are expanded to bfloat16
on their way to the tensor cores, exactly: outputs are the rows of every product, as only those may
come from registers. The rest is as in `batchmla.kernels.triton.moe_gemm`.
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.quant import Coding, Quantised
from batchmla.kernels.triton.act_mul import Act, Activation, activate
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.expert_products import ExpertProducts
from batchmla.kernels.triton.expert_tiles import MANY, TileShape, boxes
from batchmla.kernels.triton.moe_gemm import rows_of, store_tile
from batchmla.kernels.triton.sort_experts import Tiles

GROUP = 32  # inputs that share a scale
ONE = tl.constexpr(127)  # the scale 1
CODES, ROWS = tl.constexpr("e2m1"), tl.constexpr("bf16")


def reads(weight: Quantised, dtype: torch.dtype) -> bool:
    """Whether these products serve the weight, for rows of `dtype`."""
    scheme = weight.scheme
    return (
        scheme.coding is Coding.E2M1
        and scheme.block == GROUP
        and scheme.scale_dtype == torch.uint8
        and weight.scale_row_O is None
        and dtype == torch.bfloat16
    )


def up_shape(tokens: int) -> TileShape:
    """Of tiles with so many rows; a gated product."""
    return _shape(tokens, 64)


def down_shape(tokens: int) -> TileShape:
    """As `up_shape`, of a product that is not gated."""
    return _shape(tokens, 128)


def _shape(tokens: int, outputs: int) -> TileShape:
    is_many = tokens == MANY
    return TileShape(
        block_t=tokens, block_o=outputs, block_k=128, is_swapped=True,
        num_warps=8 if is_many else 4, num_stages=2 if is_many else 3,
    )  # fmt: skip


@triton.jit
def _add_product(
    total, x, weight, box_row, code_rows, scale_rows, start, inputs, HAS_BOXES: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """`total` [O, T] + W xᵀ; what lies beyond the inputs is 0 times 1."""
    if HAS_BOXES:
        codes = weight.load([box_row, start // 2])
    else:
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)
        codes = tl.load(code_rows + byte[None, :], mask=(2 * byte < inputs)[None, :], other=0)
    group = start // GROUP_SIZE + tl.arange(0, BLOCK_K // GROUP_SIZE)
    is_group = (group * GROUP_SIZE < inputs)[None, :]
    scales = tl.load(scale_rows + group[None, :], mask=is_group, other=ONE)
    return tl.dot_scaled(codes, scales, CODES, tl.trans(x), None, ROWS, acc=total, fast_math=True)


@triton.jit
def _gemm_kernel(
    x, weight, scales, out, order, ends, tile_expert, tile_first, x_stride, out_stride,
    expert_rows, inputs, outputs, active, limit, alpha,
    ACT: tl.constexpr, HAS_BOXES: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE: tl.constexpr,
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
    output = tl.minimum(first_output + tl.arange(0, BLOCK_O), outputs - 1)
    row = expert.to(tl.int64) * expert_rows + output
    gate_codes = weight
    up_codes = weight
    if not HAS_BOXES:
        gate_codes = weight + row[:, None] * (inputs // 2)
        up_codes = weight + (row + outputs)[:, None] * (inputs // 2)
    gate_scales = scales + row[:, None] * (inputs // GROUP_SIZE)
    up_scales = scales + (row + outputs)[:, None] * (inputs // GROUP_SIZE)
    gates = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    ups = gates
    for start in range(0, inputs, BLOCK_K):
        if IS_EVEN:
            rows = tl.load(x_rows + start)
        else:
            rows = tl.load(x_rows + start, mask=(start + k < inputs)[None, :], other=0.0)
        gates = _add_product(
            gates, rows, weight, box_row, gate_codes, gate_scales, start, inputs, HAS_BOXES,
            BLOCK_K, GROUP_SIZE,
        )  # fmt: skip
        if IS_UP:
            ups = _add_product(
                ups, rows, weight, box_row + outputs, up_codes, up_scales, start, inputs,
                HAS_BOXES, BLOCK_K, GROUP_SIZE,
            )  # fmt: skip
    result = gates
    if IS_UP:
        result = activate(gates, ups, limit, alpha, ACT)
    store_tile(out, out_stride, written, inside, result, first_output, outputs, True, BLOCK_O)


def _launch(
    x: torch.Tensor,
    weight: Quantised,
    out: torch.Tensor,
    tiles: Tiles,
    active: int,
    activation: Activation,
    shape: TileShape,
) -> None:
    inputs, outputs = x.shape[1], out.shape[1]
    assert weight.shape[2] == inputs, f"{weight.shape} for {inputs} inputs"
    assert inputs % GROUP == 0, f"{inputs} inputs in groups of {GROUP}"
    assert weight.codes.is_contiguous() and weight.scales.is_contiguous(), "a strided weight"
    if x.stride(1) != 1:
        x = x.contiguous()
    codes = boxes(weight.codes, shape, shape.block_k // 2)
    _gemm_kernel[(tiles.num_tiles * triton.cdiv(outputs, shape.block_o),)](
        x, codes, weight.scales, out, *tiles.tensors, x.stride(0), out.stride(0), weight.shape[1],
        inputs, outputs, active, float(activation.limit), float(activation.alpha),
        ACT=int(activation.act), HAS_BOXES=not isinstance(codes, torch.Tensor),
        IS_EVEN=inputs % shape.block_k == 0, BLOCK_T=shape.block_t, BLOCK_O=shape.block_o,
        BLOCK_K=shape.block_k, GROUP_SIZE=GROUP, num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )  # fmt: skip


_PRODUCTS = ExpertProducts(_launch)
up_product, down_product = _PRODUCTS.up, _PRODUCTS.down


_TYPES = (
    dict.fromkeys(("order", "ends", "tile_expert", "tile_first"), "*i32")
    | dict.fromkeys(("x_stride", "out_stride", "expert_rows", "inputs", "outputs", "active"), "i32")
    | {"x": "*bf16", "scales": "*u8", "out": "*bf16", "limit": "fp32", "alpha": "fp32"}
)


def _case(
    shape: TileShape, act: Act, *, has_boxes: bool = True, targets: tuple[int, ...] = (90,)
) -> AotCase:
    return AotCase(
        name=f"fp4 experts {'up' if act else 'down'}, {shape.block_t} tokens"
        + ("" if has_boxes else ", no boxes"),
        kernel=_gemm_kernel,
        types=_TYPES
        | {
            "weight": f"tensordesc<u8[{shape.block_o},{shape.block_k // 2}]>"
            if has_boxes
            else "*u8"
        },
        constants={
            "ACT": int(act), "HAS_BOXES": has_boxes, "IS_EVEN": True, "BLOCK_T": shape.block_t,
            "BLOCK_O": shape.block_o, "BLOCK_K": shape.block_k, "GROUP_SIZE": GROUP,
        },
        aligned=(
            "x", "scales", "out", "order", "ends", "x_stride", "out_stride", "expert_rows",
            "inputs", "outputs", *(() if has_boxes else ("weight",)),
        ),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        requires=("HGMMA", *(("UTMALDG",) if has_boxes else ())),
        targets=targets,
    )  # fmt: skip


AOT_CASES = (
    _case(up_shape(16), Act.CLAMPED, targets=(90, 100)),
    _case(up_shape(128), Act.CLAMPED),
    _case(down_shape(32), Act.NONE),
    _case(up_shape(32), Act.CLAMPED, has_boxes=False, targets=(80, 90)),
)
