"""Routing and experts over sorted tokens. Shapes: see `batchmla.kernels.ops`."""

import torch
import torch.nn.functional as F

from batchmla.kernels.cpu.linear import act_mul, one_linear
from batchmla.kernels.ops import Packed, RouterDims, Scoring

MAX_ROWS_AT_ONCE = 256  # beyond, the products of experts that were not chosen cost more than a loop


def route(
    x_TM: torch.Tensor, weight_EM: torch.Tensor, bias_E: torch.Tensor | None, dims: RouterDims
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens at once; weight and bias are float32."""
    logits_TE = F.linear(x_TM.float(), weight_EM)
    is_sigmoid = dims.scoring is Scoring.SIGMOID
    scores_TE = logits_TE.sigmoid_() if is_sigmoid else logits_TE.softmax(dim=1)
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


def experts(
    x_TM: torch.Tensor,
    weights_TA: torch.Tensor,
    ids_TA: torch.Tensor,
    up: Packed,
    down: Packed,
) -> torch.Tensor:
    """Small experts all at once for up to 256 rows, else each over the tokens it received."""
    num_experts = up.shape[0]
    if len(up.laid_out) > num_experts and x_TM.shape[0] <= MAX_ROWS_AT_ONCE:
        return _at_once(x_TM, weights_TA, ids_TA, up, down)
    flat_X, order_X = ids_TA.flatten().sort()
    token_X = order_X // ids_TA.shape[1]
    sorted_XM = x_TM.index_select(0, token_X)
    ends_E = torch.searchsorted(
        flat_X, torch.arange(num_experts, device=flat_X.device), right=True, out_int32=True
    )
    each = _prepacked if up.laid_out else _grouped
    out_XM = each(sorted_XM, ends_E, up, down).float().mul_(weights_TA.flatten()[order_X, None])
    out_TM = torch.zeros(x_TM.shape, dtype=torch.float32, device=x_TM.device)
    return out_TM.index_add_(0, token_X, out_XM).to(x_TM.dtype)


def _at_once(
    x_TM: torch.Tensor, weights_TA: torch.Tensor, ids_TA: torch.Tensor, up: Packed, down: Packed
) -> torch.Tensor:
    """One MLP of E*F features; those of experts that were not chosen are weighted by 0."""
    num_experts, num_tokens = up.shape[0], x_TM.shape[0]
    hidden_TX = act_mul(one_linear(x_TM, up, num_experts))
    weights_TE = torch.zeros(num_tokens, num_experts, dtype=weights_TA.dtype, device=x_TM.device)
    weights_TE.scatter_(1, ids_TA, weights_TA)
    hidden_TEF = hidden_TX.view(num_tokens, num_experts, -1)
    hidden_TEF.mul_(weights_TE.to(x_TM.dtype)[:, :, None])
    return one_linear(hidden_TX, down, num_experts)


def _prepacked(
    sorted_XM: torch.Tensor, ends_E: torch.Tensor, up: Packed, down: Packed
) -> torch.Tensor:
    """A loop over the experts that received tokens."""
    parts, start = [], 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            hidden_XF = act_mul(one_linear(sorted_XM[start:end], up, expert))
            parts.append(one_linear(hidden_XF, down, expert))
        start = end
    return torch.cat(parts)


def _grouped(
    sorted_XM: torch.Tensor, ends_E: torch.Tensor, up: Packed, down: Packed
) -> torch.Tensor:
    """torch's grouped product over plain weights."""
    assert up.plain is not None and down.plain is not None
    hidden_XF = act_mul(F.grouped_mm(sorted_XM, up.plain.transpose(1, 2), offs=ends_E))
    return F.grouped_mm(hidden_XF, down.plain.transpose(1, 2), offs=ends_E)
