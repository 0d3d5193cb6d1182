"""Routing and experts over sorted tokens. Shapes: see `batchmla.kernels.ops`."""

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.linear import act_mul, one_linear
from batchmla.kernels.ops import Packed, RouterDims


def route(
    x_TM: torch.Tensor, weight_EM: torch.Tensor, bias_E: torch.Tensor, dims: RouterDims
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens at once; weight and bias are float32."""
    scores_TE = F.linear(x_TM.float(), weight_EM).sigmoid_()
    choice_TE = scores_TE + bias_E
    if dims.kept_groups < dims.groups:
        choice_TGX = choice_TE.view(-1, dims.groups, choice_TE.shape[1] // dims.groups)
        best_TG = choice_TGX.topk(min(2, choice_TGX.shape[2]), dim=2).values.sum(dim=2)
        dropped = best_TG.topk(dims.groups - dims.kept_groups, dim=1, largest=False).indices
        drop_TGX = dropped[:, :, None].expand(-1, -1, choice_TGX.shape[2])
        choice_TE = choice_TGX.scatter(1, drop_TGX, float("-inf")).flatten(1)
    ids_TA = choice_TE.topk(dims.active, dim=1, sorted=False).indices
    weights_TA = scores_TE.gather(1, ids_TA)
    if dims.normalise:
        weights_TA.div_(weights_TA.sum(dim=1, keepdim=True) + 1e-20)
    return weights_TA.mul_(dims.scale), ids_TA


def experts(
    x_TM: torch.Tensor,
    weights_TA: torch.Tensor,
    ids_TA: torch.Tensor,
    up: Packed,
    down: Packed,
) -> torch.Tensor:
    """A loop over the experts that received tokens."""
    num_experts, num_active = up.shape[0], ids_TA.shape[1]
    flat_X, order_X = ids_TA.flatten().sort()
    ends = torch.searchsorted(flat_X, torch.arange(num_experts, device=flat_X.device), right=True)
    token_X = order_X // num_active
    weight_X1 = weights_TA.flatten()[order_X, None]
    sorted_XM = x_TM.index_select(0, token_X)
    parts, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            hidden_XF = act_mul(one_linear(sorted_XM[start:end], up, expert))
            parts.append(one_linear(hidden_XF, down, expert))
        start = end
    out_XM = torch.cat(parts).float().mul_(weight_X1)
    out_TM = torch.zeros(x_TM.shape, dtype=torch.float32, device=x_TM.device)
    return out_TM.index_add_(0, token_X, out_XM).to(x_TM.dtype)
