"""Products with e4m3 weights that have a scale a block of 128 inputs, on 8-bit tensor cores.

T rows, X choices, E experts, O outputs, K inputs, S rows of scales, B blocks of inputs. Rows are
made e4m3 too, with a scale for 128 of their values; the sum over a block is scaled and added in
float32, which the tensor cores alone do not hold. One kernel serves experts (see
`batchmla.kernels.triton.moe_gemm`) and a single matrix over all rows ("dense").
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
from batchmla.kernels.triton.quant import quantise
from batchmla.kernels.triton.sort_experts import Tiles

BLOCK_K = 128  # inputs that share a scale
CAPABILITY = (8, 9)  # the first with 8-bit floating tensor cores


def reads(weight: Quantised) -> bool:
    """Whether these products serve the weight where it lies; in the interpreter they run on a
    CPU."""
    scheme, device = weight.scheme, weight.device
    if scheme.coding is not Coding.E4M3 or scheme.block != BLOCK_K:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= CAPABILITY


def up_shape(tokens: int) -> TileShape:
    """Of tiles with so many rows; a gated product."""
    return _shape(tokens, 64)


def down_shape(tokens: int) -> TileShape:
    """As `up_shape`, of a product that is not gated."""
    return _shape(tokens, 128)


def _shape(tokens: int, outputs: int) -> TileShape:
    is_many = tokens == MANY
    return TileShape(
        block_t=tokens, block_o=outputs, block_k=BLOCK_K, is_swapped=not is_many,
        num_warps=8 if is_many else 4, num_stages=4,
    )  # fmt: skip


@triton.jit
def scale_values(scales):
    """float32; bytes are exponents with bias 127, of which the byte 0 is no normal number."""
    if scales.dtype == tl.uint8:
        bits = scales.to(tl.int32) << 23
        values = tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)
    else:
        values = scales.to(tl.float32)
    return values


@triton.jit
def _block_sums(
    rows, weight, rows_scale, weight_scale, IS_SWAPPED: tl.constexpr, IS_UNIFORM: tl.constexpr
):
    """Scaled sums over one block, [T, O] or swapped."""
    if IS_SWAPPED:
        sums = tl.dot(weight, tl.trans(rows))
        factors = rows_scale[None, :]
        factors = factors * (weight_scale if IS_UNIFORM else weight_scale[:, None])
    else:
        sums = tl.dot(rows, tl.trans(weight))
        factors = rows_scale[:, None]
        factors = factors * (weight_scale if IS_UNIFORM else weight_scale[None, :])
    return sums * factors


@triton.jit
def _gemm_kernel(
    x, x_scales, weight, scales, scale_rows, bias, out, order, ends, tile_expert, tile_first,
    num_rows, x_scale_row, x_scale_block, out_stride, expert_rows, expert_scale_rows, blocks,
    inputs, outputs, active, limit, alpha,
    ACT: tl.constexpr, IS_DENSE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MAP: tl.constexpr,
    IS_UNIFORM: tl.constexpr, HAS_BOXES: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_SWAPPED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    IS_UP: tl.constexpr = ACT != 0
    parts = tl.cdiv(outputs, BLOCK_O)
    tile = tl.program_id(0) // parts
    first_output = tl.program_id(0) % parts * BLOCK_O
    if IS_DENSE:
        expert = tile * 0
        places = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = places < num_rows
        read = tl.minimum(places, num_rows - 1).to(tl.int64)
        written = read
    else:
        expert = tl.load(tile_expert + tile)
        if expert < 0:
            return
        read, written, inside = rows_of(
            order, ends, tile_first, tile, expert, active, IS_UP, BLOCK_T
        )
    k = tl.arange(0, BLOCK)
    x_rows = x + read[:, None] * inputs + k[None, :]
    x_scale_rows = x_scales + read * x_scale_row
    box_row = expert * expert_rows + first_output
    output = tl.minimum(first_output + tl.arange(0, BLOCK_O), outputs - 1)
    expert_scales = expert.to(tl.int64) * expert_scale_rows * blocks
    gate_rows = weight
    up_rows = weight
    if not HAS_BOXES:
        row = expert.to(tl.int64) * expert_rows + output
        gate_rows = weight + row[:, None] * inputs + k[None, :]
        up_rows = weight + (row + outputs)[:, None] * inputs + k[None, :]
    scaled = first_output if IS_UNIFORM else output  # one, or each
    gate_row = tl.load(scale_rows + scaled) if HAS_MAP else scaled
    gate_scales = scales + expert_scales + gate_row.to(tl.int64) * blocks
    up_scales = gate_scales
    if IS_UP:
        up_row = tl.load(scale_rows + scaled + outputs) if HAS_MAP else scaled + outputs
        up_scales = scales + expert_scales + up_row.to(tl.int64) * blocks
    if IS_SWAPPED:
        gates = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    else:
        gates = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    ups = gates
    for block in range(0, blocks):
        start = block * BLOCK
        beyond = (start + k < inputs)[None, :]
        if IS_EVEN:
            rows = tl.load(x_rows + start)
        else:
            rows = tl.load(x_rows + start, mask=beyond, other=0.0)
        rows_scale = tl.load(x_scale_rows + block * x_scale_block)
        if HAS_BOXES:
            gate = weight.load([box_row, start])
        else:
            gate = tl.load(gate_rows + start, mask=beyond, other=0.0)
        gate_scale = scale_values(tl.load(gate_scales + block))
        gates += _block_sums(rows, gate, rows_scale, gate_scale, IS_SWAPPED, IS_UNIFORM)
        if IS_UP:
            if HAS_BOXES:
                up = weight.load([box_row + outputs, start])
            else:
                up = tl.load(up_rows + start, mask=beyond, other=0.0)
            up_scale = scale_values(tl.load(up_scales + block))
            ups += _block_sums(rows, up, rows_scale, up_scale, IS_SWAPPED, IS_UNIFORM)
    result = gates
    if IS_UP:
        result = activate(gates, ups, limit, alpha, ACT)
    if HAS_BIAS:
        added = tl.load(bias + output).to(tl.float32)
        if IS_SWAPPED:
            result += added[:, None]
        else:
            result += added[None, :]
    store_tile(out, out_stride, written, inside, result, first_output, outputs, IS_SWAPPED, BLOCK_O)


def dense_product(
    x_TI: torch.Tensor,
    weight: Quantised,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
    shape: TileShape,
) -> torch.Tensor:
    """x Wᵀ + b → [T, O] of `dtype`; rows are made e4m3."""
    out_TO = x_TI.new_empty(len(x_TI), weight.shape[0], dtype=dtype)
    if out_TO.numel():
        _launch(x_TI, weight, out_TO, None, 1, Activation(Act.NONE), shape, bias_O)
    return out_TO


def _launch(
    x: torch.Tensor,
    weight: Quantised,
    out: torch.Tensor,
    tiles: Tiles | None,
    active: int,
    activation: Activation,
    shape: TileShape,
    bias_O: torch.Tensor | None = None,
) -> None:
    codes, x_scales = quantise(x)
    inputs, outputs, is_up = x.shape[1], out.shape[1], activation.act is not Act.NONE
    *_, expert_rows, weight_inputs = weight.shape
    scale_rows, blocks = weight.scales.shape[-2:]
    assert weight_inputs == inputs, f"{weight.shape} for {inputs} inputs"
    assert weight.codes.is_contiguous() and weight.scales.is_contiguous(), "a strided weight"
    matrices = boxes(weight.codes.view(torch.float8_e4m3fn), shape)
    has_one_scale = weight.scheme.row_unit % shape.block_o == 0
    num_tiles = triton.cdiv(len(x), shape.block_t) if tiles is None else tiles.num_tiles
    _gemm_kernel[(num_tiles * triton.cdiv(outputs, shape.block_o),)](
        codes, x_scales, matrices, weight.scales, weight.scale_row_O, bias_O, out,
        *((None,) * 4 if tiles is None else tiles.tensors), len(x), *x_scales.stride(),
        out.stride(0), expert_rows, scale_rows, blocks, inputs, outputs, active,
        float(activation.limit), float(activation.alpha),
        ACT=int(activation.act), IS_DENSE=tiles is None, HAS_BIAS=bias_O is not None,
        HAS_MAP=weight.scale_row_O is not None,
        IS_UNIFORM=has_one_scale and not (is_up and outputs % shape.block_o),
        HAS_BOXES=not isinstance(matrices, torch.Tensor), IS_EVEN=inputs % BLOCK_K == 0,
        IS_SWAPPED=shape.is_swapped, BLOCK_T=shape.block_t, BLOCK_O=shape.block_o, BLOCK=BLOCK_K,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip


_PRODUCTS = ExpertProducts(_launch)
up_product, down_product = _PRODUCTS.up, _PRODUCTS.down


_INTS = (
    "num_rows", "x_scale_row", "x_scale_block", "out_stride", "expert_rows", "expert_scale_rows",
    "blocks", "inputs", "outputs", "active",
)  # fmt: skip
_TYPES = (
    dict.fromkeys(("order", "ends", "tile_expert", "tile_first", "scale_rows"), "*i32")
    | dict.fromkeys(("x_scales", "scales"), "*fp32")
    | dict.fromkeys(_INTS, "i32")
    | {"x": "*fp8e4nv", "out": "*bf16", "bias": "*bf16", "limit": "fp32", "alpha": "fp32"}
)


def _case(
    name: str, shape: TileShape, act: Act, *, targets: tuple[int, ...] = (90,), **flags: bool
) -> AotCase:
    on = {
        "IS_DENSE": False, "HAS_BIAS": False, "HAS_MAP": True, "IS_UNIFORM": True,
        "HAS_BOXES": True, "IS_EVEN": True,
    } | flags  # fmt: skip
    box = f"tensordesc<fp8e4nv[{shape.block_o},{shape.block_k}]>"
    return AotCase(
        name=f"fp8 {name}, {shape.block_t} tokens",
        kernel=_gemm_kernel,
        types=_TYPES | {"weight": box if on["HAS_BOXES"] else "*fp8e4nv"},
        constants=on
        | {
            "ACT": int(act), "IS_SWAPPED": shape.is_swapped, "BLOCK_T": shape.block_t,
            "BLOCK_O": shape.block_o, "BLOCK": shape.block_k,
        },
        aligned=(
            "x", "x_scales", "scales", "out", "order", "ends", "out_stride", "inputs", "outputs",
            "expert_rows", *(() if on["HAS_BOXES"] else ("weight",)),
        ),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        requires=("QGMMA", "LDGSTS", *(("UTMALDG",) if on["HAS_BOXES"] else ())),
        targets=targets,
    )  # fmt: skip


AOT_CASES = (
    _case("experts up", up_shape(16), Act.SILU, targets=(90, 100)),
    _case("experts up", up_shape(128), Act.SILU),
    _case("experts up, a scale a row", up_shape(32), Act.SILU, IS_UNIFORM=False),
    _case("experts down", down_shape(128), Act.NONE, targets=(90, 100)),
    _case("linear", down_shape(64), Act.NONE, IS_DENSE=True, HAS_BIAS=True),
)
