"""Gated pooling of windows (DeepSeek-V4 report, eq. 11-12 and 22-23). E entries, N places of a
window, C channels; a program takes some channels of one entry."""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase

TILE_VALUES = 4096
WARPS = 4


@triton.jit
def _pool_kernel(
    values, gates, out, value_entry, value_place, gate_entry, gate_place, num_places, width,
    PLACES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    places = tl.arange(0, PLACES)[:, None]
    inside = (places < num_places) & (channels < width)[None, :]
    at = entry * gate_entry + places * gate_place + channels[None, :]
    gate = tl.load(gates + at, mask=inside, other=float("-inf")).to(tl.float32)
    most = tl.max(gate, axis=0)[None, :]
    is_open = gate > float("-inf")
    weights = tl.where(is_open, tl.exp(gate - most), 0.0)
    at = entry * value_entry + places * value_place + channels[None, :]
    value = tl.load(values + at, mask=inside & is_open, other=0.0).to(tl.float32)
    pooled = tl.sum(weights * value, axis=0) / tl.sum(weights, axis=0)
    tl.store(out + entry * width + channels, pooled, mask=channels < width)


def pool(values_ENC: torch.Tensor, gates_ENC: torch.Tensor) -> torch.Tensor:
    """See `PoolOp`; a value that is left out is not read."""
    num_entries, num_places, width = values_ENC.shape
    assert gates_ENC.shape == values_ENC.shape, (gates_ENC.shape, values_ENC.shape)
    out_EC = torch.empty(num_entries, width, dtype=torch.float32, device=values_ENC.device)
    if not out_EC.numel():
        return out_EC
    if values_ENC.stride(2) != 1:
        values_ENC = values_ENC.contiguous()
    if gates_ENC.stride(2) != 1:
        gates_ENC = gates_ENC.contiguous()
    places, channels = _tile(num_places, width)
    _pool_kernel[(num_entries, triton.cdiv(width, channels))](
        values_ENC, gates_ENC, out_EC, *values_ENC.stride()[:2], *gates_ENC.stride()[:2],
        num_places, width, PLACES=places, CHANNELS=channels, num_warps=WARPS,
    )  # fmt: skip
    return out_EC


def _tile(num_places: int, width: int) -> tuple[int, int]:
    """(places, channels) of a program."""
    places = triton.next_power_of_2(num_places)
    return places, min(triton.next_power_of_2(width), max(16, TILE_VALUES // places))


def _case(num_places: int, width: int) -> AotCase:
    places, channels = _tile(num_places, width)
    strides = ("value_entry", "value_place", "gate_entry", "gate_place")
    return AotCase(
        name=f"pool {num_places} x {width}",
        kernel=_pool_kernel,
        types={
            "values": "*fp32", "gates": "*fp32", "out": "*fp32", **dict.fromkeys(strides, "i32"),
            "num_places": "i32", "width": "i32",
        },
        constants={"PLACES": places, "CHANNELS": channels},
        aligned=("values", "gates", "out", *strides, "width"),
        num_warps=WARPS,
    )  # fmt: skip


AOT_CASES = (_case(8, 512), _case(128, 512))
