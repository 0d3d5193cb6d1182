"""Kimi Delta Attention: a matrix a head in the place of keys and values, which forgets channel by
channel and is corrected by what each token adds (Kimi-Linear report, section 3).

Its size does not grow: with the last inputs of a short convolution it lives in the sequence's lane.
T tokens, H heads of this rank, D width of a head's keys and values alike, M model width, C = 3 H D
channels of the convolution (queries, keys, values).
"""

from dataclasses import dataclass

import torch

from batchmla.attention.kda_plan import KdaPlan
from batchmla.kernels.ops import Ops
from batchmla.kv.cache import LayerCache
from batchmla.kv.layout import DTYPE_BYTES, KVPart
from batchmla.kv.step import Step
from batchmla.layers.block import Block, Weight
from batchmla.layers.linear import ColLinear, Linear, RowLinear
from batchmla.parallel import Par

KIND = "kda"
STATE_DTYPE = "float32"  # small changes add up over a whole sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaDims:
    """The widths of one rank."""

    heads: int
    width: int
    taps: int  # tokens that the convolution sees, its own included


def parts(dims: KdaDims, kv_dtype: str) -> tuple[KVPart, ...]:
    """The convolution's last inputs, in bfloat16 where `kv_dtype` is a format of records, and a
    matrix a head."""
    conv_dtype = kv_dtype if kv_dtype in DTYPE_BYTES else "bfloat16"
    return (
        KVPart(
            name="conv", width=3 * dims.heads * dims.width, dtype=conv_dtype,
            window=dims.taps - 1, is_state=True,
        ),
        KVPart(
            name="state", width=dims.width**2, dtype=STATE_DTYPE, window=dims.heads, is_state=True
        ),
    )  # fmt: skip


class KdaAttention(Block):
    """One product gives queries, keys, values, and what the gates are made of: forgetting and
    output gate through a narrow waist, the strength of a token at once."""

    def __init__(self, par: Par, ops: Ops, *, width: int, dims: KdaDims, eps: float) -> None:
        """`dims` are this rank's."""
        mine, wide = dims.heads * dims.width, dims.heads * dims.width * par.placement.tensor
        self.dims = dims
        self.down = Linear(ops, width, mine, mine, mine, dims.width, dims.width, dims.heads)
        self.conv = Weight(3 * mine, 1, dims.taps)
        self.forget_up = ColLinear(par, ops, dims.width, wide)
        self.log_rate = Weight(1, 1, dims.heads, 1, is_float32=True)
        self.forget_bias = Weight(mine, is_float32=True)
        self.gate_up = ColLinear(par, ops, dims.width, wide)
        self.out_norm = Weight(dims.width)
        self.out = RowLinear(par, ops, wide, width)
        self._ops = ops
        self._eps = eps

    def forward(
        self, x_TM: torch.Tensor, step: Step, plan: KdaPlan, cache: LayerCache
    ) -> torch.Tensor:
        """[T, M] → [T, M]; reads the lanes first and leaves them as they are after the step."""
        ops, dims = self._ops.kda, self.dims
        mine = dims.heads * dims.width
        mixed_TC, forget_TD, gate_TD, write_TH = torch.split(
            self.down.forward(x_TM), [3 * mine, dims.width, dims.width, dims.heads], dim=1
        )
        qkv_TC = self._convolve(mixed_TC, plan, cache["conv"])
        q_THD, k_THD, v_THD = qkv_TC.view(len(x_TM), 3, dims.heads, dims.width).unbind(1)
        decay_THD, beta_TH = ops.gates(
            self.forget_up.forward(forget_TD.contiguous()), write_TH,
            self.log_rate.tensor.view(-1), self.forget_bias.tensor,
        )  # fmt: skip
        found_THD = ops.delta(q_THD, k_THD, v_THD, decay_THD, beta_TH, cache["state"], plan.rows)
        gate_TX = self.gate_up.forward(gate_TD.contiguous())
        gate_THD = gate_TX.view(found_THD.shape)
        out_THD = ops.gated_norm(found_THD, gate_THD, self.out_norm.tensor, self._eps)
        return self.out.forward(out_THD.flatten(1))

    def _convolve(self, mixed_TC: torch.Tensor, plan: KdaPlan, lanes: torch.Tensor) -> torch.Tensor:
        """The step's inputs are read as a lane would give them back, so that it makes no
        difference where a chunk was cut."""
        mixed_TC = mixed_TC.to(lanes.dtype).to(mixed_TC.dtype)
        held_XC = lanes.index_select(0, plan.lanes_S).to(mixed_TC.dtype).flatten(0, 1)
        rows_XC = torch.cat((held_XC, mixed_TC, mixed_TC.new_zeros(1, mixed_TC.shape[1])))
        self._ops.write(lanes, plan.slots_X, mixed_TC.index_select(0, plan.kept_X))
        return self._ops.kda.convolve(rows_XC, self.conv.tensor, plan.places_WT)
