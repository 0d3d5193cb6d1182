"""gqa and mla over pages, by the kernels that fit each sequence; tables are made once a step.

T tokens, N rows of some of them, G sequences, H query heads, K key heads, D head dim, C latent, X
latent and rope, W value width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from batchmla.kernels.groups import EXPANDED_BYTES, Groups, Spans
from batchmla.kernels.ops import MlaDims, Ops, Packed
from batchmla.kernels.sparse_ops import ReadRecordOp, Record
from batchmla.kernels.triton.gqa_decode import decode_tiling, gqa_decode
from batchmla.kernels.triton.latent_rows import LatentRows
from batchmla.kernels.triton.mla_decode import mla_decode, narrow_tiling, wide_tiling
from batchmla.kernels.triton.plans import (
    NO_LIMIT,
    expanded_chunks,
    gqa_splits,
    gqa_tiles,
    latent_splits,
)
from batchmla.kernels.triton.prefill import HeadRows, prefill, prefill_tiling
from batchmla.kernels.triton.spans import put

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What kernels must know of one."""

    has_tma: bool
    codes: torch.dtype  # by which e4m3 is read
    has_tensor_memory: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """By its compute capability; a CPU interprets kernels, and reads by pointers."""
        if device.type != "cuda":
            return cls(has_tma=False, codes=torch.float8_e4m3fn)
        capability = torch.cuda.get_device_capability(device)
        codes = torch.float8_e4m3fn if capability >= (8, 9) else torch.uint8
        return cls(
            has_tma=capability >= (9, 0),
            codes=codes,
            has_tensor_memory=(10, 0) <= capability < (12, 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What tests make small."""

    split_tokens: int | None = None  # None: the tiling's
    expanded_bytes: int = EXPANDED_BYTES


class Attention:
    """gqa and mla; groups without spans go to `plain`."""

    def __init__(
        self,
        plain: Ops,
        read_record: ReadRecordOp,
        *,
        limits: Limits | None = None,
        device_of: Callable[[torch.device], Device] = Device.of,
    ) -> None:
        self._plain = plain
        self._read_record = read_record
        self._limits = limits or Limits()
        self._device_of = device_of

    def gqa(
        self,
        q_THD: torch.Tensor,
        key_PBW: torch.Tensor,
        value_PBW: torch.Tensor,
        groups: Groups,
        scale: float,
        record: Record | None = None,
    ) -> torch.Tensor:
        """See `GqaOp`."""
        if not groups.spans:
            return self._plain.gqa(q_THD, key_PBW, value_PBW, groups, scale, record)
        num_tokens, num_heads, width = q_THD.shape
        if q_THD.stride(2) != 1:
            q_THD = q_THD.contiguous()
        out_THD = q_THD.new_empty(num_tokens, num_heads, width)
        key_heads = (key_PBW.shape[2] if record is None else record.values) // width
        device = self._device_of(q_THD.device)
        key, value = (_heads(cache, width, record, device.codes) for cache in (key_PBW, value_PBW))
        group, itemsize = num_heads // key_heads, q_THD.element_size()
        tiling = prefill_tiling(width, itemsize, has_tma=device.has_tma)
        for spans in groups.spans:
            for is_single in (True, False):
                split = decode_tiling(group, width, itemsize, is_single=is_single)
                split = replace(split, split_tokens=self._split(split.split_tokens))
                tables = gqa_splits(spans, group, split, q_THD.device, is_single=is_single)
                boxes = _boxes(key_PBW, value_PBW, width, split.keys) if device.has_tma else None
                gqa_decode(
                    q_THD, key, value, tables, out_THD, scale * LOG2_E, split,
                    key_heads=key_heads, page_tokens=spans.page_tokens, boxes=boxes,
                )  # fmt: skip
            prefill(
                q_THD, key, value, gqa_tiles(spans, group, tiling, q_THD.device), out_THD,
                scale * LOG2_E, tiling,
                key_heads=key_heads, page_tokens=spans.page_tokens, keys=(0, NO_LIMIT),
            )  # fmt: skip
        return out_THD.flatten(1)

    def mla(
        self,
        q_THD: torch.Tensor,
        cache_PBW: torch.Tensor,
        kv_b: Packed,
        absorbed: Groups,
        expanded: Groups,
        dims: MlaDims,
        record: Record | None = None,
    ) -> torch.Tensor:
        """See `MlaOp`."""
        if not absorbed.spans and not expanded.spans:
            return self._plain.mla(q_THD, cache_PBW, kv_b, absorbed, expanded, dims, record)
        assert kv_b.plain is not None, "the up-projection is read as it is"
        up_HXC = kv_b.plain.view(dims.heads, dims.nope + dims.value, dims.latent)
        out_TX = q_THD.new_empty(len(q_THD), dims.heads * dims.value)
        for spans in absorbed.spans:
            self._absorbed(q_THD, cache_PBW, up_HXC, spans, dims, out_TX, record)
        for spans in expanded.spans:
            self._expanded(q_THD, cache_PBW, kv_b.plain, spans, dims, out_TX, record)
        return out_TX

    def _split(self, split_tokens: int) -> int:
        return self._limits.split_tokens or split_tokens

    def _absorbed(
        self,
        q_THD: torch.Tensor,
        cache_PBW: torch.Tensor,
        up_HXC: torch.Tensor,
        spans: Spans,
        dims: MlaDims,
        out_TX: torch.Tensor,
        record: Record | None,
    ) -> None:
        """All heads read the latent rows; the up-projections move to queries and results."""
        rows_N = None
        if spans.num_rows != len(q_THD):
            rows_N = spans.kept.get("rows", lambda: put(spans.rows(), q_THD.device))
            q_THD = q_THD.index_select(0, rows_N)
        q_HNC = torch.bmm(q_THD[..., : dims.nope].transpose(0, 1), up_HXC[:, : dims.nope])
        q_NHX = torch.cat((q_HNC.transpose(0, 1), q_THD[..., dims.nope :]), dim=-1)
        z_NHC = q_NHX.new_empty(len(q_THD), dims.heads, dims.latent)
        self._attend_latents(
            q_NHX, cache_PBW, spans, dims, z_NHC, record, is_part=rows_N is not None
        )
        out_HNW = torch.bmm(z_NHC.transpose(0, 1), up_HXC[:, dims.nope :].transpose(1, 2))
        out_NX = out_HNW.transpose(0, 1).flatten(1)
        if rows_N is None:
            out_TX.copy_(out_NX)
        else:
            out_TX.index_copy_(0, rows_N, out_NX)

    def _attend_latents(
        self,
        q_NHX: torch.Tensor,
        cache_PBW: torch.Tensor,
        spans: Spans,
        dims: MlaDims,
        z_NHC: torch.Tensor,
        record: Record | None,
        *,
        is_part: bool,
    ) -> None:
        """Single queries of few heads by one kernel, the others by another."""
        device = self._device_of(q_NHX.device)
        rows = LatentRows.of(cache_PBW, dims, record, device.codes)
        for is_narrow in (True, False):
            choose = narrow_tiling if is_narrow else wide_tiling
            tiling = choose(
                dims.heads, q_NHX.element_size(), has_records=record is not None,
                has_tensor_memory=device.has_tensor_memory,
            )  # fmt: skip
            tiling = replace(tiling, split_tokens=self._split(tiling.split_tokens))
            tables = latent_splits(
                spans, dims.heads, tiling, q_NHX.device, is_narrow=is_narrow, is_part=is_part
            )
            mla_decode(
                q_NHX, rows, tables, z_NHC, dims.scale * LOG2_E, tiling,
                is_narrow=is_narrow, has_tma=device.has_tma,
            )  # fmt: skip

    def _expanded(
        self,
        q_THD: torch.Tensor,
        cache_PBW: torch.Tensor,
        kv_b: torch.Tensor,
        spans: Spans,
        dims: MlaDims,
        out_TX: torch.Tensor,
        record: Record | None,
    ) -> None:
        """Keys and values of every head are made from the latent rows, some pages at a time."""
        if q_THD.stride(2) != 1:
            q_THD = q_THD.contiguous()
        has_tma = self._device_of(q_THD.device).has_tma
        itemsize, step = q_THD.element_size(), dims.nope + dims.value
        tiling = prefill_tiling(dims.nope + dims.rope, itemsize, has_tma=has_tma)
        page_bytes = spans.page_tokens * dims.heads * step * itemsize
        num_pages = max(1, self._limits.expanded_bytes // page_bytes)
        chunks = expanded_chunks(spans, num_pages, tiling, q_THD.device)
        state = None
        if any(chunk.keys[0] for chunk in chunks):
            state = (
                q_THD.new_empty((len(q_THD), dims.heads, dims.value), dtype=torch.float32),
                q_THD.new_empty((len(q_THD), dims.heads), dtype=torch.float32),
            )
        for chunk in chunks:
            row_LX = self._gathered(cache_PBW, chunk.pages_U, record, q_THD.dtype)
            kv_LX = F.linear(row_LX[:, : dims.latent], kv_b)
            parts = {
                name: HeadRows(base=base, stride=base.stride(0), step=by, width=width)
                for name, base, by, width in (
                    ("key", kv_LX, step, dims.nope),
                    ("value", kv_LX[:, dims.nope :], step, dims.value),
                    ("tail", row_LX[:, dims.latent :], 0, dims.rope),
                )
            }
            prefill(
                q_THD, parts["key"], parts["value"], chunk.tables,
                out_TX.view(len(q_THD), dims.heads, dims.value), dims.scale * LOG2_E, tiling,
                key_heads=dims.heads, page_tokens=spans.page_tokens, tail=parts["tail"],
                keys=chunk.keys, state=state,
            )  # fmt: skip

    def _gathered(
        self,
        cache_PBW: torch.Tensor,
        pages_U: torch.Tensor,
        record: Record | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The rows of some pages."""
        if record is None:
            return cache_PBW.index_select(0, pages_U).flatten(0, 1).to(dtype)
        page_tokens = cache_PBW.shape[1]
        places_B = torch.arange(page_tokens, device=pages_U.device)
        slots_N = (pages_U[:, None] * page_tokens + places_B).flatten()
        return self._read_record(cache_PBW, slots_N, record, dtype)


def reads_pages(dtype: torch.dtype, widths: object) -> bool:
    """Keys and values of all widths are read where they lie."""
    return True


def _heads(
    cache_PBW: torch.Tensor, width: int, record: Record | None, codes: torch.dtype
) -> HeadRows:
    """Where heads lie in a cache."""
    flat = cache_PBW.flatten(0, 1)
    if record is None:
        return HeadRows(base=flat, stride=flat.stride(0), step=width, width=width)
    assert record.tile == width and record.has_e8m0 and not record.scales_last, record
    return HeadRows(
        base=flat[:, : record.values].view(codes), stride=flat.stride(0), step=width, width=width,
        factors=flat[:, record.values :],
    )  # fmt: skip


def _boxes(
    key_PBW: torch.Tensor, value_PBW: torch.Tensor, width: int, keys: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The caches as rows, where pages hold whole tiles and a head is a power of two wide."""
    rows = key_PBW.flatten(0, 1), value_PBW.flatten(0, 1)
    is_even = width >= 16 and width & (width - 1) == 0 and key_PBW.shape[1] % keys == 0
    is_aligned = all(
        part.dtype != torch.uint8
        and part.data_ptr() % 16 == 0
        and part.stride(0) * part.element_size() % 16 == 0
        for part in rows
    )
    return rows if is_even and is_aligned else None
