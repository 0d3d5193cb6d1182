"""Products of sorted tokens with experts kept as codes of any coding and block, expanded on the
way.

T tokens, X choices, E experts, O outputs, K inputs, S rows of scales, B blocks of inputs. A value
is code times scale in float32, rounded to the dtype of the rows: what `Quantised.expanded` gives,
a tile at a time. It serves what neither 8-bit tensor cores nor e2m1's own products do: int4, other
blocks, devices without them. The rest is as in `batchmla.kernels.triton.moe_gemm`.
"""

import torch
import triton
import triton.language as tl

from batchmla.kernels.quant import Coding, Quantised
from batchmla.kernels.triton.act_mul import Act, Activation, activate
from batchmla.kernels.triton.aot import AotCase
from batchmla.kernels.triton.expert_products import ExpertProducts
from batchmla.kernels.triton.expert_tiles import MANY, TileShape
from batchmla.kernels.triton.moe_gemm import rows_of, store_tile
from batchmla.kernels.triton.moe_gemm_fp8 import scale_values
from batchmla.kernels.triton.quant import decode_e4m3
from batchmla.kernels.triton.sort_experts import Tiles

FEW = 32  # tokens of a tile
E4M3, E2M1, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_CODINGS = {Coding.E4M3: E4M3, Coding.E2M1: E2M1, Coding.INT4: INT4}


def up_shape(tokens: int, dtype: torch.dtype) -> TileShape:
    """Of tiles with so many rows; a gated product."""
    return _shape(tokens, dtype, 64)


def down_shape(tokens: int, dtype: torch.dtype) -> TileShape:
    """As `up_shape`, of a product that is not gated."""
    return _shape(tokens, dtype, 128)


def _shape(tokens: int, dtype: torch.dtype, outputs: int) -> TileShape:
    """Steps are long where few tokens leave room: bytes on their way hide the memory's delay."""
    is_wide = dtype == torch.float32
    return TileShape(
        block_t=tokens, block_o=outputs // 2 if is_wide else outputs,
        block_k=64 if is_wide or tokens > FEW else 128, is_swapped=True,
        num_warps=8 if tokens == MANY else 4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _decode(nibbles, CODING: tl.constexpr):
    """float32 values of four bits each."""
    if CODING == INT4:
        values = (nibbles - 8).to(tl.float32)
    else:
        # exponent and fraction lie in float32's lowest ones of each: 2**126 too small
        small = ((nibbles & 7) << 22).to(tl.float32, bitcast=True)
        magnitude = (small * 8.507059173023462e37).to(tl.int32, bitcast=True)
        values = (magnitude | ((nibbles & 8) << 28)).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _weight_tile(
    code_rows, scale_rows, start, inputs, block, CODING: tl.constexpr, RUN: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 values [O, K], 0 beyond the inputs; so many inputs of a `RUN` share a scale."""
    if CODING == E4M3:
        k = start + tl.arange(0, BLOCK_K)[None, :]
        codes = decode_e4m3(tl.load(code_rows + k, mask=k < inputs, other=0))
    else:
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        pairs = tl.load(code_rows + byte, mask=2 * byte < inputs, other=0).to(tl.int32)
        codes = tl.join(_decode(pairs & 15, CODING), _decode(pairs >> 4, CODING))
    run = start + tl.arange(0, BLOCK_K // RUN)[None, :] * RUN
    factors = scale_values(tl.load(scale_rows + run // block, mask=run < inputs, other=0))
    factors = tl.where(run < inputs, factors, 0.0)
    runs = tl.reshape(codes, [BLOCK_O, BLOCK_K // RUN, RUN]) * factors[:, :, None]
    return tl.reshape(runs, [BLOCK_O, BLOCK_K])


@triton.jit
def _gemm_kernel(
    x, weight, scales, scale_rows, out, order, ends, tile_expert, tile_first, x_stride,
    out_stride, expert_rows, expert_scale_rows, blocks, block, row_bytes, inputs, outputs, active,
    limit, alpha,
    ACT: tl.constexpr, CODING: tl.constexpr, HAS_MAP: tl.constexpr, RUN: tl.constexpr,
    IS_EVEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
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
    output = tl.minimum(first_output + tl.arange(0, BLOCK_O), outputs - 1)
    wide = expert.to(tl.int64)
    gate_codes = weight + (wide * expert_rows + output)[:, None] * row_bytes
    up_codes = weight + (wide * expert_rows + output + outputs)[:, None] * row_bytes
    gate_row = tl.load(scale_rows + output) if HAS_MAP else output
    gate_scales = scales + (wide * expert_scale_rows + gate_row)[:, None] * blocks
    up_scales = gate_scales
    if IS_UP:
        up_row = tl.load(scale_rows + output + outputs) if HAS_MAP else output + outputs
        up_scales = scales + (wide * expert_scale_rows + up_row)[:, None] * blocks
    gates = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    ups = gates
    for start in range(0, inputs, BLOCK_K):
        if IS_EVEN:
            rows = tl.load(x_rows + start)
        else:
            rows = tl.load(x_rows + start, mask=(start + k < inputs)[None, :], other=0.0)
        gate = _weight_tile(
            gate_codes, gate_scales, start, inputs, block, CODING, RUN, BLOCK_O, BLOCK_K
        ).to(x.dtype.element_ty)
        gates = tl.dot(gate, tl.trans(rows), gates, input_precision="ieee")
        if IS_UP:
            up = _weight_tile(
                up_codes, up_scales, start, inputs, block, CODING, RUN, BLOCK_O, BLOCK_K
            ).to(x.dtype.element_ty)
            ups = tl.dot(up, tl.trans(rows), ups, input_precision="ieee")
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
    inputs, outputs, scheme = x.shape[1], out.shape[1], weight.scheme
    scale_rows, blocks = weight.scales.shape[-2:]
    assert weight.shape[2] == inputs, f"{weight.shape} for {inputs} inputs"
    assert weight.codes.is_contiguous() and weight.scales.is_contiguous(), "a strided weight"
    if x.stride(1) != 1:
        x = x.contiguous()
    _gemm_kernel[(tiles.num_tiles * triton.cdiv(outputs, shape.block_o),)](
        x, weight.codes, weight.scales, weight.scale_row_O, out, *tiles.tensors, x.stride(0),
        out.stride(0), weight.shape[1], scale_rows, blocks, scheme.block, weight.codes.shape[2],
        inputs, outputs, active, float(activation.limit), float(activation.alpha),
        ACT=int(activation.act), CODING=_CODINGS[scheme.coding],
        HAS_MAP=weight.scale_row_O is not None, RUN=run_length(scheme.block, shape.block_k),
        IS_EVEN=inputs % shape.block_k == 0, BLOCK_T=shape.block_t, BLOCK_O=shape.block_o,
        BLOCK_K=shape.block_k, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip


_PRODUCTS = ExpertProducts(_launch)
up_product, down_product = _PRODUCTS.up, _PRODUCTS.down


def run_length(block: int, most: int) -> int:
    """The longest power of two that divides both."""
    return min(block & -block, most)


_INTS = (
    "x_stride", "out_stride", "expert_rows", "expert_scale_rows", "blocks", "block", "row_bytes",
    "inputs", "outputs", "active",
)  # fmt: skip
_TYPES = (
    dict.fromkeys(("order", "ends", "tile_expert", "tile_first", "scale_rows"), "*i32")
    | dict.fromkeys(_INTS, "i32")
    | {"x": "*bf16", "weight": "*u8", "out": "*bf16", "limit": "fp32", "alpha": "fp32"}
)


def _case(
    coding: Coding, scales: str, block: int, shape: TileShape, act: Act, *targets: int
) -> AotCase:
    return AotCase(
        name=f"{coding} experts {'up' if act else 'down'} by blocks of {block}, "
        f"{shape.block_t} tokens",
        kernel=_gemm_kernel,
        types=_TYPES | {"scales": f"*{scales}"},
        constants={
            "ACT": int(act), "CODING": _CODINGS[coding], "HAS_MAP": coding is Coding.E4M3,
            "RUN": run_length(block, shape.block_k), "IS_EVEN": True, "BLOCK_T": shape.block_t,
            "BLOCK_O": shape.block_o, "BLOCK_K": shape.block_k,
        },
        aligned=(
            "x", "weight", "scales", "out", "order", "ends", "x_stride", "out_stride",
            "expert_rows", "row_bytes", "block", "inputs", "outputs",
        ),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        requires=("HGMMA",),
        targets=targets,
    )  # fmt: skip


_BF16 = torch.bfloat16
AOT_CASES = (
    _case(Coding.INT4, "bf16", 32, up_shape(16, _BF16), Act.SILU, 80, 90, 100),
    _case(Coding.INT4, "bf16", 32, down_shape(32, _BF16), Act.NONE, 90),
    _case(Coding.INT4, "bf16", 32, up_shape(128, _BF16), Act.SILU, 90),
    _case(Coding.E4M3, "fp32", 128, up_shape(32, _BF16), Act.SILU, 80),
)
