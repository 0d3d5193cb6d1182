"""Routing and experts, one token at a time. Shapes: see `batchmla.kernels.ops`."""

import torch

from batchmla.kernels.ops import Packed, RouterDims, Scoring
from batchmla.kernels.reference.linear import act_mul, plain


def route(
    x_TM: torch.Tensor, weight_EM: torch.Tensor, bias_E: torch.Tensor | None, dims: RouterDims
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bias-corrected, group-limited choice (DeepSeek-V3 report, section 2.1.2; DeepSeek-V2's has
    no bias)."""
    logits_TE = x_TM.float() @ weight_EM.float().T
    if dims.scoring is Scoring.SIGMOID:
        scores_TE = 1 / (1 + torch.exp(-logits_TE))
    else:
        powers_TE = torch.exp(logits_TE - logits_TE.amax(dim=1, keepdim=True))
        scores_TE = powers_TE / powers_TE.sum(dim=1, keepdim=True)
    weights, ids = [], []
    for scores_E in scores_TE:
        choice_E = scores_E if bias_E is None else scores_E + bias_E.float()
        groups_GX = choice_E.view(dims.groups, -1)
        num_best = min(dims.group_best, groups_GX.shape[1])
        best = groups_GX.topk(num_best, dim=1).values.sum(dim=1)
        kept = best.topk(dims.kept_groups).indices
        limited_GX = torch.full_like(groups_GX, float("-inf"))
        limited_GX[kept] = groups_GX[kept]
        ids_A = limited_GX.flatten().topk(dims.active).indices
        weights_A = scores_E[ids_A]
        if dims.normalise:
            weights_A = weights_A / (weights_A.sum() + 1e-20)
        weights.append(weights_A * dims.scale)
        ids.append(ids_A)
    return torch.stack(weights), torch.stack(ids)


def experts(
    x_TM: torch.Tensor,
    weights_TA: torch.Tensor,
    ids_TA: torch.Tensor,
    up: Packed,
    down: Packed,
) -> torch.Tensor:
    """Every token through each of its experts."""
    up_EFM, down_EMF = plain(up).float(), plain(down).float()
    out_TM = torch.zeros_like(x_TM, dtype=torch.float32)
    for token, (weights_A, ids_A) in enumerate(zip(weights_TA, ids_TA.tolist(), strict=True)):
        for weight, expert in zip(weights_A, ids_A, strict=True):
            hidden_F = act_mul(up_EFM[expert] @ x_TM[token].float())
            out_TM[token] += weight * (down_EMF[expert] @ hidden_F)
    return out_TM.to(x_TM.dtype)
