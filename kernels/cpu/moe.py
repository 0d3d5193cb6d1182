"""Routing. Shapes: see `batchmla.kernels.ops`."""

import torch
import torch.nn.functional as F

from batchmla.kernels.ops import RouterDims, Scoring


def route(
    x_TM: torch.Tensor, weight_EM: torch.Tensor, bias_E: torch.Tensor | None, dims: RouterDims
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens at once; weight and bias are float32."""
    return choose(F.linear(x_TM.float(), weight_EM), bias_E, dims)


def choose(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, dims: RouterDims
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token by itself. The sigmoid is written out: torch's own rounds a value differently at
    the end of a run of values, and exact mode chooses by this function too."""
    if dims.scoring is Scoring.SIGMOID:
        scores_TE = logits_TE.neg().exp_().add_(1).reciprocal_()
    else:
        scores_TE = logits_TE.softmax(dim=1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if dims.kept_groups < dims.groups:
        choice_TGX = choice_TE.view(-1, dims.groups, choice_TE.shape[1] // dims.groups)
        num_best = min(dims.group_best, choice_TGX.shape[2])
        best_TG = choice_TGX.topk(num_best, dim=2).values.sum(dim=2)
        dropped = best_TG.topk(dims.groups - dims.kept_groups, dim=1, largest=False).indices
        drop_TGX = dropped[:, :, None].expand(-1, -1, choice_TGX.shape[2])
        choice_TE = choice_TGX.scatter(1, drop_TGX, float("-inf")).flatten(1)
    ids_TA = choice_TE.topk(dims.active, dim=1, sorted=False).indices
    weights_TA = scores_TE.gather(1, ids_TA)
    if dims.normalise:
        weights_TA.div_(weights_TA.sum(dim=1, keepdim=True) + 1e-20)
    return weights_TA.mul_(dims.scale), ids_TA
