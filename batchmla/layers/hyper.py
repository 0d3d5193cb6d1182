"""Residual streams and how a layer reads and writes them (DeepSeek-V4 report, section 2.2).

T tokens, J streams, M model width.
"""

from dataclasses import dataclass

import torch

from batchmla.kernels.ops import Ops, PackKind
from batchmla.layers.block import Block, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperDims:
    """`rounds` of Sinkhorn scaling; `norm_eps` is the model's, `eps` that of the weights."""

    streams: int
    width: int
    rounds: int
    eps: float
    norm_eps: float


class _Streams(Block):
    """Numbers that a token's streams, normed together, give for themselves."""

    def __init__(self, ops: Ops, dims: HyperDims, num_numbers: int, num_scales: int) -> None:
        whole = dims.streams * dims.width
        self.dims = dims
        self.fn = Weight(num_numbers, whole, kind=PackKind.LINEAR, is_float32=True)
        self.base = Weight(num_numbers, is_float32=True)
        self.scale = Weight(num_scales, is_float32=True)
        self._ops = ops

    def numbers(self, x_TJM: torch.Tensor) -> torch.Tensor:
        """[T, num_numbers], float32."""
        flat_TX = x_TJM.flatten(1).float()
        normed_TX = self._ops.norm(flat_TX, flat_TX.new_ones(flat_TX.shape[1]), self.dims.norm_eps)
        return self._ops.linear(normed_TX, self.fn.packed, None)


class HyperConnection(_Streams):
    """What a sublayer reads of the streams, and what they become by its result."""

    def __init__(self, ops: Ops, dims: HyperDims) -> None:
        super().__init__(ops, dims, dims.streams * (dims.streams + 2), 3)

    def read(self, x_TJM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(the sublayer's input [T, M], post_TJ, mix_TJJ)."""
        pre_TJ, post_TJ, mix_TJJ = self._ops.hybrid.hyper_weights(
            self.numbers(x_TJM), self.base.tensor, self.scale.tensor, self.dims.streams,
            self.dims.rounds, self.dims.eps,
        )  # fmt: skip
        return collapse(x_TJM, pre_TJ), post_TJ, mix_TJJ

    def write(
        self,
        y_TM: torch.Tensor,
        x_TJM: torch.Tensor,
        post_TJ: torch.Tensor,
        mix_TJJ: torch.Tensor,
    ) -> torch.Tensor:
        """Stream k becomes post_k · y + Σ_j mix_jk · x_j, summed in float32."""
        new_TJM = y_TM.float()[:, None] * post_TJ[:, :, None]
        for index, stream_TM in enumerate(x_TJM.unbind(1)):
            new_TJM += stream_TM.float()[:, None] * mix_TJJ[:, index, :, None]
        return new_TJM.to(x_TJM.dtype)


class HyperHead(_Streams):
    """The streams' last sum."""

    def __init__(self, ops: Ops, dims: HyperDims) -> None:
        super().__init__(ops, dims, dims.streams, 1)

    def forward(self, x_TJM: torch.Tensor) -> torch.Tensor:
        """[T, J, M] → [T, M], weighted by sigmoid(·) + eps."""
        numbers_TJ = self.numbers(x_TJM) * self.scale.tensor + self.base.tensor
        pre_TJ = numbers_TJ.neg_().exp_().add_(1).reciprocal_().add_(self.dims.eps)
        return collapse(x_TJM, pre_TJ)


def collapse(x_TJM: torch.Tensor, weights_TJ: torch.Tensor) -> torch.Tensor:
    """Σ_j weight_j · x_j in float32, stream by stream."""
    streams = x_TJM.unbind(1)
    total_TM = streams[0].float() * weights_TJ[:, :1]
    for index, stream_TM in enumerate(streams[1:], 1):
        total_TM += stream_TM.float() * weights_TJ[:, index : index + 1]
    return total_TM.to(x_TJM.dtype)
