"""A block of the gated delta rule in products, in place of its tokens one by one.

With t_i the sum of the log-decays of a block's tokens up to i, and S the state before it, the rule
unrolls to
    u_i = beta_i (v_i - Sᵀ(exp(t_i) k_i) - Σ_{j<i} a_ij u_j),  a_ij = Σ_d k_i k_j exp(t_i - t_j),
a unit lower triangular system for all u of the block (the UT transform of products of Householder-
like matrices). Results and the state behind the block are products with u. No exponent is above 0:
a_ij is computed by halves, of which the later one decays from the border between the two, and the
earlier one to it. The sums are float64, as decays of tokens far apart differ by little of them, and
count down to -40 only: no float32 holds less beside 1, and numbers near its smallest are slow.

N sequences, C tokens of a block (a power of two), H heads, D head width, G = N*H.
"""

import torch

BLOCK = 64
LEAST_EXPONENT = -40.0


def run_block(
    q_NCHD: torch.Tensor,
    k_NCHD: torch.Tensor,
    v_NCHD: torch.Tensor,
    decay_NCHD: torch.Tensor,
    beta_NCH: torch.Tensor,
    state_NHDD: torch.Tensor,
) -> torch.Tensor:
    """[N, C, H, D]; the states in place. All float32; q and k at their lengths."""
    shape = q_NCHD.shape
    q, k, v, decay = (_by_head(x) for x in (q_NCHD, k_NCHD, v_NCHD, decay_NCHD))
    beta_GC1 = _by_head(beta_NCH[..., None])
    state_GDD = state_NHDD.view(-1, *state_NHDD.shape[2:])
    sum_GCD = decay.double().cumsum(dim=1)
    k_scores_GCC, q_scores_GCC = scores(k, q, sum_GCD)
    since_GCD = _decayed(sum_GCD)
    k_read_GCD, q_read_GCD = torch.bmm(
        torch.cat((k * since_GCD, q * since_GCD), dim=1), state_GDD
    ).chunk(2, dim=1)
    u_GCD = torch.linalg.solve_triangular(
        k_scores_GCC.mul_(beta_GC1),
        (v - k_read_GCD).mul_(beta_GC1),
        upper=False,
        unitriangular=True,
    )
    out_GCD = torch.baddbmm(q_read_GCD, q_scores_GCC, u_GCD)
    last_G1D = sum_GCD[:, -1:]
    left_GCD = _decayed(last_G1D - sum_GCD).mul_(k)
    state_GDD.mul_(_decayed(last_G1D).transpose(1, 2))
    state_GDD.baddbmm_(left_GCD.transpose(1, 2), u_GCD)
    return out_GCD.view(shape[0], shape[2], shape[1], -1).transpose(1, 2)


def scores(
    k_GCD: torch.Tensor, q_GCD: torch.Tensor, sum_GCD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[G, C, C] of keys with earlier keys, and of queries with keys up to their own; else 0."""
    num_heads, length, width = k_GCD.shape
    found_G2CC = k_GCD.new_zeros(num_heads, 2, length, length)
    half = length // 2
    while half:
        pairs = length // (2 * half)
        cut = (num_heads, pairs, 2, half, width)
        (early_k, late_k), (_, late_q), (early_sum, late_sum) = (
            x.view(cut).unbind(2) for x in (k_GCD, q_GCD, sum_GCD)
        )  # [G, P, half, D]
        border = early_sum[:, :, -1:]
        late_decay = _decayed(late_sum - border)
        late = torch.cat((late_k * late_decay, late_q * late_decay), dim=2)
        early = _decayed(border - early_sum).mul_(early_k)
        products = torch.matmul(late, early.transpose(2, 3))  # [G, P, 2 * half, half]
        both = found_G2CC.view(num_heads, 2, pairs, 2, half, pairs, 2, half)
        place = both.diagonal(dim1=2, dim2=5)[:, :, 1, :, 0]  # [G, 2, half, half, P]
        by_kind = products.view(num_heads, pairs, 2, half, half)
        place.copy_(by_kind.permute(0, 2, 3, 4, 1))
        half //= 2
    k_scores_GCC, q_scores_GCC = found_G2CC.unbind(1)
    q_scores_GCC.diagonal(dim1=1, dim2=2).copy_((q_GCD * k_GCD).sum(dim=-1))
    return k_scores_GCC, q_scores_GCC


def _decayed(sum_GXD: torch.Tensor) -> torch.Tensor:
    return sum_GXD.float().clamp_(min=LEAST_EXPONENT).exp_()


def _by_head(x_NCHX: torch.Tensor) -> torch.Tensor:
    """[G, C, X]."""
    return x_NCHX.transpose(1, 2).flatten(0, 1).contiguous()
