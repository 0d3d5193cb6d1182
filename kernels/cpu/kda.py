"""Kimi Delta Attention, many tokens at once. Shapes: see `batchmla.kernels.kda_ops`.

Short runs of tokens go token by token, those of many sequences together; long ones in blocks, as
`kda_block` says. Exact mode goes token by token and sequence by sequence always: each call has the
same shape then, and a token's numbers cannot depend on where a chunk was cut.

N sequences that go together.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from batchmla.kernels.cpu.hybrid import sigmoid
from batchmla.kernels.cpu.kda_block import BLOCK, run_block
from batchmla.kernels.cpu.norm import norm
from batchmla.kernels.kda_ops import DeltaOp, HostInts, KdaOps, LaneRows

LENGTH_EPS = 1e-6
LEAST_BLOCK = 8  # shorter runs go token by token
STATE_VALUES = 2**20  # of sequences that go together: more outgrow the caches


def convolve(x_XC: torch.Tensor, weight_C1W: torch.Tensor, places_WT: torch.Tensor) -> torch.Tensor:
    """Tap by tap over all tokens."""
    first, *others = zip(weight_C1W[:, 0].float().unbind(1), places_WT, strict=True)
    z_TC = x_XC.index_select(0, first[1]).float().mul_(first[0])
    for tap_C, places_T in others:
        z_TC.add_(x_XC.index_select(0, places_T).float().mul_(tap_C))
    return sigmoid(z_TC).mul_(z_TC).to(x_XC.dtype)


def gates(
    forget_TX: torch.Tensor,
    write_TH: torch.Tensor,
    log_rate_H: torch.Tensor,
    bias_X: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softplus(z) = max(z, 0) + log(1 + exp(-|z|)), written out as in `hybrid`."""
    z_TX = forget_TX.float() + bias_X.float()
    softplus_TX = z_TX.abs().neg_().exp_().log1p_().add_(z_TX.clamp_(min=0))
    rate_H1 = log_rate_H.float().exp().neg_()[:, None]
    decay_THD = softplus_TX.view(len(z_TX), len(rate_H1), -1).mul_(rate_H1)
    return decay_THD, sigmoid(write_TH.float())


def gated_norm(
    x_THD: torch.Tensor, gate_THD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """In float32, rounded once."""
    return norm(x_THD.float(), weight_D, eps).mul_(sigmoid(gate_THD.float())).to(gate_THD.dtype)


def unit(x_THD: torch.Tensor, length: float = 1.0) -> torch.Tensor:
    """Float32 vectors of that length."""
    wide_THD = x_THD.float()
    scale_TH1: torch.Tensor = torch.linalg.vector_norm(wide_THD, dim=-1, keepdim=True)
    return wide_THD * scale_TH1.square_().add_(LENGTH_EPS).rsqrt_().mul_(length)


def run_token(
    q_NHD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    keep_NHD: torch.Tensor,
    beta_NH: torch.Tensor,
    state_NHDD: torch.Tensor,
) -> torch.Tensor:
    """One token of each sequence; the state is read once, as Sᵀq of the new state is
    Sᵀ(keep · q) of the old one plus u (k·q)."""
    both_NH2D = torch.stack((k_NHD * keep_NHD, q_NHD * keep_NHD), dim=2)
    found_NH2D = torch.matmul(both_NH2D, state_NHDD)
    u_NHD = (v_NHD - found_NH2D[:, :, 0]).mul_(beta_NH[..., None])
    out_NHD = (q_NHD * k_NHD).sum(dim=-1, keepdim=True) * u_NHD
    state_NHDD.mul_(keep_NHD[..., None]).addcmul_(k_NHD[..., None], u_NHD[:, :, None])
    return out_NHD.add_(found_NH2D[:, :, 1])


def delta(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    decay_THD: torch.Tensor,
    beta_TH: torch.Tensor,
    state_LHX: torch.Tensor,
    rows: LaneRows,
) -> torch.Tensor:
    """Sequences with runs of like length together."""
    q_THD, k_THD = unit(q_THD, q_THD.shape[-1] ** -0.5), unit(k_THD)
    inputs = (q_THD, k_THD, v_THD.float(), decay_THD, beta_TH)
    out_THD = torch.empty_like(q_THD)
    at_once = max(1, STATE_VALUES // state_LHX[0].numel())
    for sequences in _batches(np.diff(rows.starts_S1), at_once):
        lanes_N = torch.from_numpy(rows.lanes_S[sequences]).to(q_THD.device)
        state_NHDD = _held(state_LHX, lanes_N, rows.is_first_S[sequences])
        starts_N = rows.starts_S1[sequences]
        counts_N = rows.starts_S1[sequences + 1] - starts_N
        if counts_N[0] < LEAST_BLOCK:
            _run_tokens(inputs, out_THD, state_NHDD, starts_N, counts_N)
        else:
            _run_blocks(inputs, out_THD, state_NHDD, starts_N, counts_N)
        state_LHX.index_copy_(0, lanes_N, state_NHDD.flatten(2))
    return out_THD


def delta_by_tokens(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    decay_THD: torch.Tensor,
    beta_TH: torch.Tensor,
    state_LHX: torch.Tensor,
    rows: LaneRows,
) -> torch.Tensor:
    """Calls of one shape only."""
    q_THD, k_THD = unit(q_THD, q_THD.shape[-1] ** -0.5), unit(k_THD)
    inputs = (q_THD, k_THD, v_THD.float(), decay_THD.exp(), beta_TH)
    out_THD = torch.empty_like(q_THD)
    starts = rows.starts_S1.tolist()
    for sequence in np.flatnonzero(np.diff(rows.starts_S1)).tolist():
        lanes_1 = torch.from_numpy(rows.lanes_S[sequence : sequence + 1]).to(q_THD.device)
        state_1HDD = _held(state_LHX, lanes_1, rows.is_first_S[sequence : sequence + 1])
        for row in range(starts[sequence], starts[sequence + 1]):
            q, k, v, keep, beta = (x[row : row + 1] for x in inputs)
            out_THD[row] = run_token(q, k, v, keep, beta, state_1HDD)[0]
        state_LHX.index_copy_(0, lanes_1, state_1HDD.flatten(2))
    return out_THD


def _batches(counts_S: HostInts, at_once: int) -> Iterator[HostInts]:
    """Up to `at_once` sequences, the longest first; none mixes short and long runs."""
    order = np.argsort(-counts_S, kind="stable")
    num_long, num_all = int((counts_S >= LEAST_BLOCK).sum()), int((counts_S > 0).sum())
    for first, end in ((0, num_long), (num_long, num_all)):
        for start in range(first, end, at_once):
            yield order[start : min(start + at_once, end)]


def _held(
    state_LHX: torch.Tensor, lanes_N: torch.Tensor, is_first_N: npt.NDArray[np.bool_]
) -> torch.Tensor:
    """[N, H, D, D] copies of lanes, zeros for those that begin."""
    state_NHX = state_LHX.index_select(0, lanes_N)
    state_NHX[torch.from_numpy(is_first_N).to(lanes_N.device)] = 0
    width = round(state_LHX.shape[2] ** 0.5)
    return state_NHX.view(*state_NHX.shape[:2], width, width)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _run_tokens(
    inputs: Inputs,
    out_THD: torch.Tensor,
    state_NHDD: torch.Tensor,
    starts_N: HostInts,
    counts_N: HostInts,
) -> None:
    """Counts fall, so those that still have tokens are the first ones."""
    for index in range(int(counts_N[0])):
        active = int((counts_N > index).sum())
        rows_N = torch.from_numpy(starts_N[:active] + index).to(out_THD.device)
        q, k, v, decay, beta = (x.index_select(0, rows_N) for x in inputs)
        out_NHD = run_token(q, k, v, decay.exp_(), beta, state_NHDD[:active])
        out_THD.index_copy_(0, rows_N, out_NHD)


def _run_blocks(
    inputs: Inputs,
    out_THD: torch.Tensor,
    state_NHDD: torch.Tensor,
    starts_N: HostInts,
    counts_N: HostInts,
) -> None:
    """Absent tokens of a last block keep the state and add nothing to it."""
    size = min(BLOCK, 1 << int(counts_N[0] - 1).bit_length())
    for first in range(0, int(counts_N[0]), size):
        active = int((counts_N > first).sum())
        offsets_NC = first + np.arange(size)[None]
        is_there_NC = offsets_NC < counts_N[:active, None]
        own_NC = np.minimum(offsets_NC, counts_N[:active, None] - 1) + starts_N[:active, None]
        rows_X = torch.from_numpy(own_NC.ravel()).to(out_THD.device)
        q, k, v, decay, beta = (
            x.index_select(0, rows_X).view(active, size, *x.shape[1:]) for x in inputs
        )
        if not is_there_NC.all():
            is_absent_NC = torch.from_numpy(~is_there_NC).to(out_THD.device)
            decay.masked_fill_(is_absent_NC[..., None, None], 0)
            beta.masked_fill_(is_absent_NC[..., None], 0)
        out_XHD = run_block(q, k, v, decay, beta, state_NHDD[:active]).flatten(0, 1)
        if not is_there_NC.all():
            there_X = torch.from_numpy(np.flatnonzero(is_there_NC)).to(out_THD.device)
            rows_X, out_XHD = rows_X[there_X], out_XHD[there_X]
        out_THD.index_copy_(0, rows_X, out_XHD)


def make_kda(by: DeltaOp = delta) -> KdaOps:
    """These ops as one value."""
    return KdaOps(convolve=convolve, gates=gates, delta=by, gated_norm=gated_norm)
