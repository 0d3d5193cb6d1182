"""Weights of hyper-connections (DeepSeek-V4 report, section 2.2). T tokens, J streams; a program
takes some tokens, whose matrices stay in registers from the softmax to the last round."""

import torch
import triton
import triton.language as tl

from batchmla.kernels.triton.aot import AotCase

TOKENS = 32
WARPS = 1


@triton.jit(do_not_specialize=["num_tokens"])
def _hyper_kernel(
    mixed, base, scale, pre, post, mix, row_stride, num_tokens, num_rounds, eps,
    STREAMS: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    streams = tl.arange(0, PADDED)
    inside = is_token[:, None] & (streams < STREAMS)[None, :]
    rows = mixed + tokens[:, None] * row_stride + streams[None, :]
    places = tokens[:, None] * STREAMS + streams[None, :]
    shift = tl.load(base + streams, mask=streams < STREAMS, other=0.0)
    values = tl.load(rows, mask=inside, other=0.0) * tl.load(scale) + shift[None, :]
    tl.store(pre + places, 1.0 / (1.0 + tl.exp(0.0 - values)) + eps, mask=inside)
    shift = tl.load(base + STREAMS + streams, mask=streams < STREAMS, other=0.0)
    values = tl.load(rows + STREAMS, mask=inside, other=0.0) * tl.load(scale + 1) + shift[None, :]
    tl.store(post + places, 2.0 / (1.0 + tl.exp(0.0 - values)), mask=inside)
    cells = streams[:, None] * STREAMS + streams[None, :]
    is_cell = (streams[:, None] < STREAMS) & (streams[None, :] < STREAMS)
    shift = tl.load(base + 2 * STREAMS + cells, mask=is_cell, other=0.0)
    at = tokens[:, None, None] * row_stride + 2 * STREAMS + cells[None, :, :]
    inside = is_token[:, None, None] & is_cell[None, :, :]
    values = tl.load(mixed + at, mask=inside, other=0.0) * tl.load(scale + 2) + shift[None, :, :]
    values = tl.where(is_cell[None, :, :], values, float("-inf"))
    values = tl.exp(values - tl.maximum(tl.max(values, axis=2), -3e38)[:, :, None])
    total = tl.maximum(tl.sum(values, axis=2), 1e-30)
    values = tl.where(is_cell[None, :, :], values / total[:, :, None] + eps, 0.0)
    for index in range(num_rounds):
        if index > 0:
            values = values / (tl.sum(values, axis=2) + eps)[:, :, None]
        values = values / (tl.sum(values, axis=1) + eps)[:, None, :]
    target = tokens[:, None, None] * (STREAMS * STREAMS) + cells[None, :, :]
    tl.store(mix + target, values, mask=inside)


def hyper_weights(
    mixed_TX: torch.Tensor,
    base_X: torch.Tensor,
    scale_3: torch.Tensor,
    num_streams: int,
    num_rounds: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `HyperWeightsOp`."""
    num_tokens, width = mixed_TX.shape
    assert width == num_streams * (num_streams + 2) == len(base_X), (mixed_TX.shape, num_streams)
    assert mixed_TX.dtype == base_X.dtype == scale_3.dtype == torch.float32, mixed_TX.dtype
    if mixed_TX.stride(1) != 1:
        mixed_TX = mixed_TX.contiguous()
    pre_TJ = mixed_TX.new_empty(num_tokens, num_streams)
    post_TJ = torch.empty_like(pre_TJ)
    mix_TJJ = mixed_TX.new_empty(num_tokens, num_streams, num_streams)
    if num_tokens:
        _hyper_kernel[(triton.cdiv(num_tokens, TOKENS),)](
            mixed_TX, base_X.contiguous(), scale_3.contiguous(), pre_TJ, post_TJ, mix_TJJ,
            mixed_TX.stride(0), num_tokens, num_rounds, eps,
            STREAMS=num_streams, PADDED=triton.next_power_of_2(num_streams), TOKENS=TOKENS,
            num_warps=WARPS,
        )  # fmt: skip
    return pre_TJ, post_TJ, mix_TJJ


_POINTERS = ("mixed", "base", "scale", "pre", "post", "mix")
AOT_CASES = (
    AotCase(
        name="hyper weights of 4 streams",
        kernel=_hyper_kernel,
        types={
            **dict.fromkeys(_POINTERS, "*fp32"), "row_stride": "i32", "num_tokens": "i32",
            "num_rounds": "i32", "eps": "fp32",
        },
        constants={"STREAMS": 4, "PADDED": 4, "TOKENS": TOKENS},
        aligned=_POINTERS,
        num_warps=WARPS,
    ),
)  # fmt: skip
