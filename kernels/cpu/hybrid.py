"""DeepSeek-V4's ops, many rows at once. Shapes: see `batchmla.kernels.hybrid_ops`.

Nothing here rounds a value by its place or by its neighbours but the products, so exact mode puts
in its own products and shares the rest. Functions like sigmoid and softplus are written out for
that: torch rounds its own differently at the end of a run of values.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.experts import ExpertLinear, expert_by_expert
from batchmla.kernels.cpu.linear import one_linear
from batchmla.kernels.cpu.records import read_record
from batchmla.kernels.hybrid_ops import HybridOps, HybridRows
from batchmla.kernels.ops import Packed
from batchmla.kernels.sparse_ops import Record

BLOCK_VALUES = 2**21  # gathered elements of a block of rows

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(q_RHD, row_RLD, bias_RHL float32, scale) → [R, H, D]."""
GroupLinear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x_GTX, weight_GOX) → [G, T, O]."""


def pool(values_ENC: torch.Tensor, gates_ENC: torch.Tensor) -> torch.Tensor:
    """Each channel over its slots."""
    weights_ENC = (gates_ENC - gates_ENC.amax(dim=1, keepdim=True)).exp_()
    total_EC = weights_ENC.sum(dim=1)
    return weights_ENC.mul_(values_ENC).sum(dim=1).div_(total_EC)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return x.neg().exp_().add_(1).reciprocal_()


def route_scores(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    ids_TA: torch.Tensor | None,
    active: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softplus(x) = max(x, 0) + log(1 + exp(-|x|))."""
    softplus_TE = logits_TE.abs().neg_().exp_().log1p_().add_(logits_TE.clamp(min=0))
    scores_TE = softplus_TE.sqrt_()
    if ids_TA is None:
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        ids_TA = choice_TE.topk(active, dim=1, sorted=False).indices
    weights_TA = scores_TE.gather(1, ids_TA)
    weights_TA = weights_TA / (weights_TA.sum(dim=1, keepdim=True) + 1e-20)
    return weights_TA.mul_(scale), ids_TA


def clamped_act_mul(gate_up_TF: torch.Tensor, limit: float) -> torch.Tensor:
    """In float32, rounded once."""
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    gate_TF = gate_TF.clamp(max=limit)
    hidden_TF = sigmoid(gate_TF).mul_(gate_TF).mul_(up_TF.clamp(-limit, limit))
    return hidden_TF.to(gate_up_TF.dtype)


def hyper_weights(
    mixed_TX: torch.Tensor,
    base_X: torch.Tensor,
    scale_3: torch.Tensor,
    num_streams: int,
    num_rounds: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tokens at once; sums over streams are written out."""
    sizes = [num_streams, num_streams, num_streams**2]
    scale_X = torch.repeat_interleave(scale_3, torch.tensor(sizes, device=scale_3.device))
    pre_TJ, post_TJ, mix_TX = torch.split(mixed_TX * scale_X + base_X, sizes, dim=1)
    mix_TJJ = mix_TX.reshape(-1, num_streams, num_streams)
    most_TJ1 = mix_TJJ.amax(dim=2, keepdim=True)
    mix_TJJ = (mix_TJJ - most_TJ1).exp_()
    mix_TJJ = mix_TJJ.div_(_sum(mix_TJJ, 2)).add_(eps)
    for index in range(num_rounds):
        if index:
            mix_TJJ = mix_TJJ.div_(_sum(mix_TJJ, 2).add_(eps))
        mix_TJJ = mix_TJJ.div_(_sum(mix_TJJ, 1).add_(eps))
    return sigmoid(pre_TJ).add_(eps), sigmoid(post_TJ).mul_(2), mix_TJJ


def _sum(x_TJJ: torch.Tensor, axis: int) -> torch.Tensor:
    """The sum along a short axis, term by term."""
    total, *rest = x_TJJ.unbind(axis)
    total = total.clone()
    for term in rest:
        total.add_(term)
    return total.unsqueeze(axis)


def attend_rows(
    q_RHD: torch.Tensor, row_RLD: torch.Tensor, bias_RHL: torch.Tensor, scale: float
) -> torch.Tensor:
    """Heads as queries of one key head."""
    row_R1LD = row_RLD[:, None]
    out_R1HD = F.scaled_dot_product_attention(
        q_RHD[:, None], row_R1LD, row_R1LD, attn_mask=bias_RHL[:, None], scale=scale
    )
    return out_R1HD[:, 0]


def group_products(x_GTX: torch.Tensor, weight_GOX: torch.Tensor) -> torch.Tensor:
    """One product a group."""
    return torch.bmm(x_GTX, weight_GOX.transpose(1, 2))


class Hybrid:
    """The ops that hold products."""

    def __init__(
        self,
        attend: Attend = attend_rows,
        expert_linear: ExpertLinear = one_linear,
        group_products: GroupLinear = group_products,
    ) -> None:
        self._attend = attend
        self._expert_linear = expert_linear
        self._group_products = group_products

    def attend(
        self,
        q_NHD: torch.Tensor,
        window_XD: torch.Tensor,
        entries_PBD: torch.Tensor | None,
        rows: HybridRows,
        sink_H: torch.Tensor,
        scale: float,
        record: Record | None,
    ) -> torch.Tensor:
        """Gathered rows behind a row of zeros, whose score the sink is."""
        num_rows, num_heads, width = q_NHD.shape
        num_window = rows.window_NW.shape[1]
        num_entries = 0 if rows.slots_NK is None else rows.slots_NK.shape[1]
        num_keys = 1 + num_window + num_entries
        is_seen_NL = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q_NHD.device)
        is_seen_NL[:, 1 : 1 + num_window] = _below(rows.window_count_N, num_window)
        if rows.entry_count_N is not None:
            is_seen_NL[:, 1 + num_window :] = _below(rows.entry_count_N, num_entries)
        block, parts = max(1, BLOCK_VALUES // (num_keys * (width + num_heads))), []
        for first in range(0, num_rows, block):
            some = slice(first, first + block)
            seen_RL = is_seen_NL[some]
            bias_RHL = torch.zeros(len(seen_RL), num_heads, num_keys, device=q_NHD.device)
            bias_RHL.masked_fill_(~seen_RL[:, None], -torch.inf)
            bias_RHL[:, :, 0] = sink_H
            row_RLD = q_NHD.new_zeros(len(seen_RL), num_keys, width)
            row_RLD[:, 1 : 1 + num_window] = window_XD[rows.window_NW[some]]
            if rows.slots_NK is not None and num_entries:
                assert entries_PBD is not None, "entries to read, and no cache of them"
                slots_X = rows.slots_NK[some].flatten()
                read_XD = (
                    entries_PBD.flatten(0, 1).index_select(0, slots_X)
                    if record is None
                    else read_record(entries_PBD, slots_X, record, q_NHD.dtype)
                )
                row_RLD[:, 1 + num_window :] = read_XD.view(-1, num_entries, width)
            parts.append(self._attend(q_NHD[some], row_RLD, bias_RHL, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def clamped_experts(
        self,
        x_TM: torch.Tensor,
        weights_TA: torch.Tensor,
        ids_TA: torch.Tensor,
        up: Packed,
        down: Packed,
        limit: float,
    ) -> torch.Tensor:
        """Expert by expert over its tokens."""
        act = partial(clamped_act_mul, limit=limit)
        return expert_by_expert(x_TM, weights_TA, ids_TA, up, down, self._expert_linear, act)

    def group_linear(self, x_TGX: torch.Tensor, weight_GOX: torch.Tensor) -> torch.Tensor:
        """Groups first, so that each is one product."""
        x_GTX = x_TGX.transpose(0, 1).contiguous()
        return self._group_products(x_GTX, weight_GOX).transpose(0, 1)


def _below(counts_N: torch.Tensor, length: int) -> torch.Tensor:
    """[N, length]: places before each row's count."""
    return torch.arange(length, device=counts_N.device) < counts_N[:, None]


def make_hybrid(hybrid: Hybrid) -> HybridOps:
    """These ops as one value."""
    return HybridOps(
        pool=pool,
        attend=hybrid.attend,
        route_scores=route_scores,
        clamped_act_mul=clamped_act_mul,
        clamped_experts=hybrid.clamped_experts,
        hyper_weights=hyper_weights,
        group_linear=hybrid.group_linear,
    )
