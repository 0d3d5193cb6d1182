"""DeepSeek Sparse Attention, row by row. Shapes: see `batchmla.kernels.sparse_ops`."""

import math
from collections.abc import Sequence

import torch

from batchmla.kernels.ops import MlaDims, Packed
from batchmla.kernels.reference.linear import plain
from batchmla.kernels.sparse_ops import SCALE_BYTES, IndexGroup, Record, SparseOps

E4M3_MOST = 448.0
LEAST_MAGNITUDE = 1e-4
E8M0_BIAS = 127


def layer_norm(
    x_TM: torch.Tensor, weight_M: torch.Tensor, bias_M: torch.Tensor, eps: float
) -> torch.Tensor:
    """LayerNorm (Ba et al. 2016, eq. 4)."""
    x = x_TM.float()
    centred = x - x.mean(dim=-1, keepdim=True)
    variance_T1 = (centred * centred).mean(dim=-1, keepdim=True)
    y = centred / torch.sqrt(variance_T1 + eps) * weight_M.float() + bias_M.float()
    return y.to(x_TM.dtype)


def select_keys(
    q_NID: torch.Tensor,
    weights_NI: torch.Tensor,
    key_PBD: torch.Tensor,
    groups: Sequence[IndexGroup],
    count: int,
    record: Record | None,
) -> torch.Tensor:
    """The lightning indexer (DeepSeek-V3.2 report, eq. 1) and an exact choice by sorting."""
    page_tokens = key_PBD.shape[1]
    slots_NK = torch.empty(q_NID.shape[0], count, dtype=torch.int64)
    for group in groups:
        for index in range(group.num_rows):
            row, seen = group.first_row + index, int(group.visible_N[index])
            pages_P = group.pages_GP[index if len(group.pages_GP) > 1 else 0].tolist()
            slots = [pages_P[at // page_tokens] * page_tokens + at % page_tokens
                     for at in range(seen)]  # fmt: skip
            k_LD = _rows(key_PBD, torch.tensor(slots), record)
            dots_IL = torch.einsum("id,ld->il", q_NID[row].float(), k_LD)
            scores_L = torch.einsum("i,il->l", weights_NI[row], dots_IL.clamp(min=0)).tolist()
            ranked = sorted(range(seen), key=lambda at: (-_number(scores_L[at]), at))
            slots_NK[row] = torch.tensor([slots[at] for at in sorted(ranked[:count])])
    return slots_NK


def _number(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _rows(cache_PBX: torch.Tensor, slots_N: torch.Tensor, record: Record | None) -> torch.Tensor:
    """Cached rows in float32."""
    if record is None:
        return cache_PBX.flatten(0, 1)[slots_N].float()
    return read_record(cache_PBX, slots_N, record, torch.float32)


def sparse_mla(
    q_NHD: torch.Tensor,
    cache_PBX: torch.Tensor,
    slots_NK: torch.Tensor,
    kv_b: Packed,
    dims: MlaDims,
    record: Record | None,
) -> torch.Tensor:
    """Latent attention over chosen rows (DeepSeek-V3.2 report, eq. 2)."""
    up_HXC = plain(kv_b).float().view(dims.heads, dims.nope + dims.value, dims.latent)
    out_NHW = q_NHD.new_empty(q_NHD.shape[0], dims.heads, dims.value)
    for row, slots_K in enumerate(slots_NK):
        row_KX, q_HD = _rows(cache_PBX, slots_K, record), q_NHD[row].float()
        q_HC = torch.einsum("hn,hnc->hc", q_HD[:, : dims.nope], up_HXC[:, : dims.nope])
        q_HX = torch.cat((q_HC, q_HD[:, dims.nope :]), dim=-1)
        scores_HK = torch.einsum("hx,kx->hk", q_HX, row_KX) * dims.scale
        weights_HK = torch.exp(scores_HK - scores_HK.amax(dim=-1, keepdim=True))
        weights_HK = weights_HK / weights_HK.sum(dim=-1, keepdim=True)
        z_HC = torch.einsum("hk,kc->hc", weights_HK, row_KX[:, : dims.latent])
        out_NHW[row] = torch.einsum("hc,hwc->hw", z_HC, up_HXC[:, dims.nope :]).to(q_NHD.dtype)
    return out_NHW.flatten(1)


def write_record(
    cache_PBY: torch.Tensor, slots_T: torch.Tensor, rows_TX: torch.Tensor, record: Record
) -> None:
    """Tile by tile."""
    for slot, row_X in zip(slots_T.tolist(), rows_TX.float(), strict=True):
        values, scales, tail = _parts(cache_PBY, slot, record)
        for tile in range(record.num_tiles):
            first, end = tile * record.tile, min((tile + 1) * record.tile, record.values)
            most = max(row_X[first:end].abs().max().item(), LEAST_MAGNITUDE)
            scale = 2.0 ** math.ceil(math.log2(most / E4M3_MOST))
            codes = (row_X[first:end] / scale).to(torch.float8_e4m3fn)
            values[first:end] = codes.view(torch.uint8)
            if record.has_e8m0:
                scales[tile] = round(math.log2(scale)) + E8M0_BIAS
            else:
                at = slice(tile * SCALE_BYTES, (tile + 1) * SCALE_BYTES)
                scales[at] = torch.tensor([scale]).view(torch.uint8)
        scales[record.scale_bytes - record.pad :] = 0
        tail[:] = row_X[record.values :].to(torch.bfloat16).view(torch.uint8)


def _parts(
    cache_PBY: torch.Tensor, slot: int, record: Record
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one record's bytes: values, scales, tail."""
    num_rows, data_bytes = cache_PBY.shape[1], record.values + record.tail_bytes
    page_X, row = cache_PBY[slot // num_rows].view(-1), slot % num_rows
    if record.scales_last:
        data_X = page_X[row * data_bytes :][:data_bytes]
        scales = page_X[num_rows * data_bytes + row * record.scale_bytes :][: record.scale_bytes]
        return data_X[: record.values], scales, data_X[record.values :]
    record_Y = page_X[row * record.num_bytes :][: record.num_bytes]
    sizes = [record.values, record.scale_bytes, record.tail_bytes]
    values, scales, tail = torch.split(record_Y, sizes)
    return values, scales, tail


def read_record(
    cache_PBY: torch.Tensor, slots_N: torch.Tensor, record: Record, dtype: torch.dtype
) -> torch.Tensor:
    """Record by record."""
    rows_NX = torch.empty(len(slots_N), record.width, dtype=dtype)
    for row_X, slot in zip(rows_NX, slots_N.tolist(), strict=True):
        values, scales, tail = _parts(cache_PBY, slot, record)
        if record.has_e8m0:
            exponents = scales[: record.num_tiles].double() - E8M0_BIAS
            factors = (2.0**exponents).float().repeat_interleave(record.tile)
        else:
            factors = scales.clone().view(torch.float32).repeat_interleave(record.tile)
        coded = values.clone().view(torch.float8_e4m3fn).float()
        row_X[: record.values] = (coded * factors[: record.values]).to(dtype)
        row_X[record.values :] = tail.clone().view(torch.bfloat16).to(dtype)
    return rows_NX


def make_sparse() -> SparseOps:
    """The specification of these ops."""
    return SparseOps(
        layer_norm=layer_norm,
        select_keys=select_keys,
        sparse_mla=sparse_mla,
        write_record=write_record,
        read_record=read_record,
    )
