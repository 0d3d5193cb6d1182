"""DeepSeek-V4's ops, row by row. Shapes: see `batchmla.kernels.hybrid_ops`."""

import torch

from batchmla.kernels.hybrid_ops import HybridOps, HybridRows
from batchmla.kernels.ops import Packed
from batchmla.kernels.reference.linear import plain
from batchmla.kernels.reference.sparse import read_record
from batchmla.kernels.sparse_ops import Record


def pool(values_ENC: torch.Tensor, gates_ENC: torch.Tensor) -> torch.Tensor:
    """Gated pooling (DeepSeek-V4 report, eq. 11-12 and 22-23)."""
    weights_ENC = torch.exp(gates_ENC - gates_ENC.amax(dim=1, keepdim=True))
    return (weights_ENC * values_ENC).sum(dim=1) / weights_ENC.sum(dim=1)


def attend(
    q_NHD: torch.Tensor,
    window_XD: torch.Tensor,
    entries_PBD: torch.Tensor | None,
    rows: HybridRows,
    sink_H: torch.Tensor,
    scale: float,
    record: Record | None,
) -> torch.Tensor:
    """Multi-query attention with a sink, the row being key and value."""
    out_NHD = torch.empty_like(q_NHD)
    for row in range(len(q_NHD)):
        read = [window_XD[rows.window_NW[row, : int(rows.window_count_N[row])]].float()]
        if entries_PBD is not None and rows.slots_NK is not None:
            assert rows.entry_count_N is not None
            slots = rows.slots_NK[row, : int(rows.entry_count_N[row])]
            if record is None:
                read.append(entries_PBD.flatten(0, 1)[slots].float())
            else:
                read.append(read_record(entries_PBD, slots, record, torch.float32))
        row_LD = torch.cat(read)
        scores_HL = q_NHD[row].float() @ row_LD.T * scale
        most_H1 = torch.maximum(scores_HL.amax(dim=1), sink_H)[:, None]
        weights_HL = torch.exp(scores_HL - most_H1)
        total_H1 = weights_HL.sum(dim=1, keepdim=True) + torch.exp(sink_H[:, None] - most_H1)
        out_NHD[row] = ((weights_HL / total_H1) @ row_LD).to(q_NHD.dtype)
    return out_NHD


def route_scores(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    ids_TA: torch.Tensor | None,
    active: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sqrt(log(1 + exp(·))) scores."""
    scores_TE = torch.sqrt(torch.logaddexp(logits_TE, torch.zeros_like(logits_TE)))
    if ids_TA is None:
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        ids_TA = choice_TE.topk(active, dim=1).indices
    weights_TA = scores_TE.gather(1, ids_TA)
    return weights_TA / (weights_TA.sum(dim=1, keepdim=True) + 1e-20) * scale, ids_TA


def clamped_act_mul(gate_up_TF: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(z) = z / (1 + exp(-z)) of what is at most `limit`."""
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    return (gate_TF / (1 + torch.exp(-gate_TF)) * up_TF).to(gate_up_TF.dtype)


def clamped_experts(
    x_TM: torch.Tensor,
    weights_TA: torch.Tensor,
    ids_TA: torch.Tensor,
    up: Packed,
    down: Packed,
    limit: float,
) -> torch.Tensor:
    """Token by token."""
    up_EFM, down_EMF = plain(up).float(), plain(down).float()
    out_TM = torch.zeros(x_TM.shape, dtype=torch.float32)
    for token, (weights_A, ids_A) in enumerate(zip(weights_TA, ids_TA.tolist(), strict=True)):
        for weight, expert in zip(weights_A, ids_A, strict=True):
            hidden_F = clamped_act_mul(up_EFM[expert] @ x_TM[token].float(), limit)
            out_TM[token] += weight * (down_EMF[expert] @ hidden_F)
    return out_TM.to(x_TM.dtype)


def hyper_weights(
    mixed_TX: torch.Tensor,
    base_X: torch.Tensor,
    scale_3: torch.Tensor,
    num_streams: int,
    num_rounds: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Manifold-constrained hyper-connections (DeepSeek-V4 report, section 2.2)."""
    sizes = [num_streams, num_streams, num_streams**2]
    parts = zip(torch.split(mixed_TX, sizes, dim=1), torch.split(base_X, sizes), scale_3,
                strict=True)  # fmt: skip
    pre_TJ, post_TJ, mix_TX = (mixed * scale + base for mixed, base, scale in parts)
    mix_TJJ = mix_TX.view(-1, num_streams, num_streams).softmax(dim=2) + eps
    for index in range(num_rounds):
        if index:
            mix_TJJ = mix_TJJ / (mix_TJJ.sum(dim=2, keepdim=True) + eps)
        mix_TJJ = mix_TJJ / (mix_TJJ.sum(dim=1, keepdim=True) + eps)
    return torch.sigmoid(pre_TJ) + eps, 2 * torch.sigmoid(post_TJ), mix_TJJ


def group_linear(x_TGX: torch.Tensor, weight_GOX: torch.Tensor) -> torch.Tensor:
    """A block-diagonal product."""
    out_TGO = torch.einsum("tgx,gox->tgo", x_TGX.float(), weight_GOX.float())
    return out_TGO.to(x_TGX.dtype)


def make_hybrid() -> HybridOps:
    """The specification of these ops."""
    return HybridOps(
        pool=pool,
        attend=attend,
        route_scores=route_scores,
        clamped_act_mul=clamped_act_mul,
        clamped_experts=clamped_experts,
        hyper_weights=hyper_weights,
        group_linear=group_linear,
    )
