"""Kimi Delta Attention, token by token. Shapes: see `batchmla.kernels.kda_ops`."""

import torch

from batchmla.kernels.kda_ops import KdaOps, LaneRows

LENGTH_EPS = 1e-6


def convolve(x_XC: torch.Tensor, weight_C1W: torch.Tensor, places_WT: torch.Tensor) -> torch.Tensor:
    """silu(z) = z / (1 + exp(-z)) of a causal convolution, channel by channel."""
    z_TC = torch.einsum("wtc,cw->tc", x_XC[places_WT].float(), weight_C1W[:, 0].float())
    return (z_TC / (1 + torch.exp(-z_TC))).to(x_XC.dtype)


def gates(
    forget_TX: torch.Tensor,
    write_TH: torch.Tensor,
    log_rate_H: torch.Tensor,
    bias_X: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softplus(z) = log(1 + exp(z))."""
    z_TX = forget_TX.float() + bias_X.float()
    softplus_TX = torch.logaddexp(z_TX, torch.zeros_like(z_TX))
    softplus_THD = softplus_TX.view(len(z_TX), len(log_rate_H), -1)
    decay_THD = -torch.exp(log_rate_H.float())[:, None] * softplus_THD
    return decay_THD, torch.sigmoid(write_TH.float())


def delta(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    decay_THD: torch.Tensor,
    beta_TH: torch.Tensor,
    state_LHX: torch.Tensor,
    rows: LaneRows,
) -> torch.Tensor:
    """As written (Kimi-Linear report, eq. 1); float64 where the state is."""
    dtype = state_LHX.dtype
    q_THD, k_THD, v_THD = (x.to(dtype) for x in (q_THD, k_THD, v_THD))
    q_THD = _unit(q_THD) * q_THD.shape[-1] ** -0.5
    k_THD = _unit(k_THD)
    keep_THD, beta_TH = decay_THD.to(dtype).exp(), beta_TH.to(dtype)
    out_THD = torch.empty_like(v_THD)
    starts = rows.starts_S1.tolist()
    for sequence, lane in enumerate(rows.lanes_S.tolist()):
        state_HDD = state_LHX[lane].view(*k_THD.shape[1:], -1)
        if rows.is_first_S[sequence]:
            state_HDD = torch.zeros_like(state_HDD)
        for row in range(starts[sequence], starts[sequence + 1]):
            state_HDD = keep_THD[row, :, :, None] * state_HDD
            found_HD = torch.einsum("hkv,hk->hv", state_HDD, k_THD[row])
            u_HD = beta_TH[row, :, None] * (v_THD[row] - found_HD)
            state_HDD = state_HDD + torch.einsum("hk,hv->hkv", k_THD[row], u_HD)
            out_THD[row] = torch.einsum("hkv,hk->hv", state_HDD, q_THD[row])
        if starts[sequence] < starts[sequence + 1]:
            state_LHX[lane] = state_HDD.flatten(1)
    return out_THD


def gated_norm(
    x_THD: torch.Tensor, gate_THD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """w · x / sqrt(mean(x²) + eps) · sigmoid(gate)."""
    x_THD = x_THD.float()
    scale_TH1 = torch.rsqrt(x_THD.square().mean(dim=-1, keepdim=True) + eps)
    return (x_THD * scale_TH1 * weight_D.float() * torch.sigmoid(gate_THD.float())).to(
        gate_THD.dtype
    )


def _unit(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD / torch.sqrt(x_THD.square().sum(dim=-1, keepdim=True) + LENGTH_EPS)


def make_kda() -> KdaOps:
    """The specification of these ops."""
    return KdaOps(convolve=convolve, gates=gates, delta=delta, gated_norm=gated_norm)
