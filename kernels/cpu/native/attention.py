"""Attention of the compiled kernels: every sequence's pages are read where they lie. Shapes: see
`batchmla.kernels.ops`."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchmla.kernels.cpu.native.calls import Calls
from batchmla.kernels.cpu.native.products import panel_linear
from batchmla.kernels.cpu.records import plain_rows
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.groups import Groups, HostInts, Spans
from batchmla.kernels.ops import MlaDims, Ops, Packed
from batchmla.kernels.sparse_ops import Record

WIDTH_UNIT = 32  # of keys and values
MOST_WIDTH = 4096
BLOCK_KEYS = 128  # that are attended at once, `BLOCK` of softmax.h


class _Lanes(ctypes.Structure):
    """`Lanes` of attention.c."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("width", ctypes.c_long),
        ("stride", ctypes.c_long),
        ("step", ctypes.c_long),
    ]


class _Job(ctypes.Structure):
    """`Job` of attention.c."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_stride", ctypes.c_long),
        ("out_stride", ctypes.c_long),
        ("heads", ctypes.c_long),
        ("key_heads", ctypes.c_long),
        ("page_rows", ctypes.c_long),
        ("table_width", ctypes.c_long),
        ("sequences", ctypes.c_long),
        ("table", ctypes.c_void_p),
        ("table_row", ctypes.c_void_p),
        ("first_row", ctypes.c_void_p),
        ("num_queries", ctypes.c_void_p),
        ("num_keys", ctypes.c_void_p),
        ("key", _Lanes),
        ("tail", _Lanes),
        ("value", _Lanes),
        ("scale", ctypes.c_float),
        ("clusters", ctypes.c_long),
        ("cluster_end", ctypes.c_void_p),
        ("cluster_keys", ctypes.c_void_p),
        ("member", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class _Clusters:
    """Sequences that share keys, as `Job` names them: C clusters of N members in all."""

    end_C: HostInts
    keys_C: HostInts
    member_N: HostInts
    place_G: HostInts
    shared_G: HostInts


def _clusters(spans: Spans) -> _Clusters:
    """Shared keys count in whole blocks, so that those of a sequence are cut where they are without
    company."""
    shared = [each for each in spans.shared if each.num_keys >= BLOCK_KEYS]
    count = len(spans.num_keys_G)
    keys_C = np.array([each.num_keys // BLOCK_KEYS * BLOCK_KEYS for each in shared], np.int64)
    sizes_C = np.array([len(each.places) for each in shared], np.int64)
    places = [each.places for each in shared]
    member_N = np.concatenate([*places, np.empty(0, np.int64)]).astype(np.int64)
    place_G, shared_G = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    place_G[member_N] = np.arange(len(member_N))
    shared_G[member_N] = np.repeat(keys_C, sizes_C)
    return _Clusters(np.cumsum(sizes_C), keys_C, member_N, place_G, shared_G)


def reads_pages(dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Whether keys and values of these widths are served."""
    is_even = all(width % WIDTH_UNIT == 0 and width <= MOST_WIDTH for width in widths)
    return dtype == torch.bfloat16 and is_even


@dataclass(frozen=True, slots=True)
class _Tables:
    """A job with everything that all layers have in common, and the arrays that it points to."""

    job: _Job
    arrays: tuple[object, ...]


def _tables(spans: Spans, first_row_G: HostInts) -> _Tables:
    clusters = _clusters(spans)
    job = _Job(
        page_rows=spans.page_tokens,
        table_width=spans.pages_GP.shape[1],
        sequences=len(first_row_G),
        table=spans.pages_GP.ctypes.data,
        table_row=spans.table_row_G.ctypes.data,
        first_row=first_row_G.ctypes.data,
        num_queries=spans.num_queries_G.ctypes.data,
        num_keys=spans.num_keys_G.ctypes.data,
        clusters=len(clusters.end_C),
        cluster_end=clusters.end_C.ctypes.data,
        cluster_keys=clusters.keys_C.ctypes.data,
        member=clusters.member_N.ctypes.data,
        place=clusters.place_G.ctypes.data,
        shared=clusters.shared_G.ctypes.data,
    )
    return _Tables(job, (spans.pages_GP, first_row_G, clusters))


def _lanes(rows: torch.Tensor, width: int, *, start: int = 0, step: int = 0) -> _Lanes:
    """`width` elements from `start` of each row of [..., X], for head h from `start + h * step`."""
    row_values = rows.shape[-1]
    return _Lanes(rows.data_ptr() + start * rows.element_size(), width, row_values, step)


def _in_bfloat16(
    spans: Spans, record: Record | None, *caches_PBW: torch.Tensor
) -> tuple[Spans, list[torch.Tensor]]:
    """The caches as the kernels read them; of one that is kept in another dtype, or as records, a
    copy of the pages in use."""
    if all(cache.dtype == torch.bfloat16 for cache in caches_PBW):
        return spans, list(caches_PBW)
    pages_U, places = np.unique(spans.pages_GP, return_inverse=True)
    table_GP = np.ascontiguousarray(places.reshape(spans.pages_GP.shape))
    used = torch.from_numpy(pages_U)
    copies = [_decoded(cache.index_select(0, used), record) for cache in caches_PBW]
    return replace(spans, pages_GP=table_GP), copies


def _decoded(pages_PBX: torch.Tensor, record: Record | None) -> torch.Tensor:
    """Pages of another dtype, or of records, in bfloat16."""
    if record is None:
        return pages_PBX.to(torch.bfloat16)
    return plain_rows(pages_PBX, record, torch.bfloat16)


class NativeAttention:
    """gqa and mla; groups without spans go to the torch forms."""

    def __init__(
        self,
        library: Calls,
        plain: Ops,
        scratch: Scratch,
    ) -> None:
        self._library = library
        self._plain = plain
        self._scratch = scratch

    def gqa(
        self,
        q_THD: torch.Tensor,
        key_PBW: torch.Tensor,
        value_PBW: torch.Tensor,
        groups: Groups,
        scale: float,
        record: Record | None = None,
    ) -> torch.Tensor:
        """Grouped-query attention."""
        if not groups.spans:
            return self._plain.gqa(q_THD, key_PBW, value_PBW, groups, scale, record)
        num_tokens, num_heads, head_dim = q_THD.shape
        if q_THD.stride()[1:] != (head_dim, 1):
            q_THD = q_THD.contiguous()
        out_TX = q_THD.new_empty(num_tokens, num_heads * head_dim)
        key_heads = (key_PBW.shape[2] if record is None else record.values) // head_dim
        for some in groups.spans:
            spans, (keys, values) = _in_bfloat16(some, record, key_PBW, value_PBW)
            self._attend(
                q_THD, out_TX, spans, spans.first_row_G, num_heads // key_heads, key_heads, scale,
                key=_lanes(keys, head_dim, step=head_dim),
                tail=_Lanes(None, 0, 0, 0),
                value=_lanes(values, head_dim, step=head_dim),
            )  # fmt: skip
        return out_TX

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
        """Multi-head latent attention in both forms."""
        if not absorbed.spans and not expanded.spans:
            return self._plain.mla(q_THD, cache_PBW, kv_b, absorbed, expanded, dims, record)
        q_THD = q_THD.contiguous()
        out_TX = q_THD.new_empty(len(q_THD), dims.heads * dims.value)
        for spans in absorbed.spans:
            self._absorbed(q_THD, cache_PBW, kv_b, spans, dims, out_TX, record)
        for spans in expanded.spans:
            self._expanded(q_THD, cache_PBW, kv_b, spans, dims, out_TX, record)
        return out_TX

    def _absorbed(
        self,
        q_THD: torch.Tensor,
        cache_PBW: torch.Tensor,
        kv_b: Packed,
        spans: Spans,
        dims: MlaDims,
        out_TX: torch.Tensor,
        record: Record | None,
    ) -> None:
        """All heads read the latent rows; the up-projections move to queries and results."""
        assert kv_b.plain is not None and kv_b.panels is not None
        spans, (cache_PBW,) = _in_bfloat16(spans, record, cache_PBW)
        rows_N = None if spans.num_rows == len(q_THD) else spans.rows()
        q_NHD, first_row_G = q_THD, spans.first_row_G
        if rows_N is not None:
            q_NHD = q_THD.index_select(0, rows_N)
            first_row_G = np.cumsum(spans.num_queries_G) - spans.num_queries_G
        num_rows, head_rows = len(q_NHD), dims.nope + dims.value
        q_NHX = q_NHD.new_empty(num_rows, dims.heads, dims.latent + dims.rope)
        self._heads(
            self._library.bmla_heads_up, q_NHD, num_rows, kv_b.plain, 0, head_rows * dims.latent,
            (dims.nope, dims.latent), q_NHX, q_NHX.stride()[:2], dims.rope,
        )  # fmt: skip
        z_NHC = q_NHX.new_empty(num_rows, dims.heads, dims.latent)
        self._attend(
            q_NHX, z_NHC, spans, first_row_G, dims.heads, 1, dims.scale,
            key=_lanes(cache_PBW, dims.latent + dims.rope),
            tail=_Lanes(None, 0, 0, 0),
            value=_lanes(cache_PBW, dims.latent),
        )  # fmt: skip
        out_NX = out_TX if rows_N is None else out_TX.new_empty(num_rows, out_TX.shape[1])
        self._heads(
            self._library.bmla_heads, z_NHC, num_rows, kv_b.panels, dims.nope * dims.latent,
            head_rows * dims.latent, (dims.latent, dims.value), out_NX,
            (out_NX.stride(0), dims.value),
        )  # fmt: skip
        if rows_N is not None:
            out_TX.index_copy_(0, rows_N, out_NX)

    def _heads(
        self,
        product: Callable[..., None],
        x_NHI: torch.Tensor,
        num_rows: int,
        weight: torch.Tensor,
        start: int,
        step: int,
        sizes: tuple[int, int],
        out: torch.Tensor,
        out_strides: Sequence[int],
        *more: int,
    ) -> None:
        """A product for every head; its weight lies `step` elements behind the one before. `more`
        are further arguments of the product."""
        product(
            x_NHI.data_ptr(), *x_NHI.stride()[:2], num_rows,
            weight.data_ptr() + start * weight.element_size(), step, *sizes,
            out.data_ptr(), *out_strides, x_NHI.shape[1], *more, torch.get_num_threads(),
        )  # fmt: skip

    def _expanded(
        self,
        q_THD: torch.Tensor,
        cache_PBW: torch.Tensor,
        kv_b: Packed,
        spans: Spans,
        dims: MlaDims,
        out_TX: torch.Tensor,
        record: Record | None,
    ) -> None:
        """Keys and values of every head are made from the latent rows, each page once."""
        assert spans.pages_U is not None, "expanded sequences name the pages they expand"
        page_tokens, row_width = cache_PBW.shape[1:]
        pages = self._scratch.take("pages", (len(spans.pages_U), page_tokens, row_width), cache_PBW)
        torch.index_select(cache_PBW, 0, spans.pages_U, out=pages)
        rows_LX = _decoded(pages.flatten(0, 1), record)
        kv_LX = panel_linear(self._library, rows_LX[:, : dims.latent], kv_b)
        step = dims.nope + dims.value
        self._attend(
            q_THD, out_TX, spans, spans.first_row_G, 1, dims.heads, dims.scale,
            key=_lanes(kv_LX, dims.nope, step=step),
            tail=_lanes(rows_LX, dims.rope, start=dims.latent),
            value=_lanes(kv_LX, dims.value, start=dims.nope, step=step),
        )  # fmt: skip

    def _attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        spans: Spans,
        first_row_G: np.ndarray[tuple[int], np.dtype[np.int64]],
        heads: int,
        key_heads: int,
        scale: float,
        *,
        key: _Lanes,
        tail: _Lanes,
        value: _Lanes,
    ) -> None:
        """One call for all sequences of the spans."""
        name = ("tables", id(spans.pages_GP))  # which lives as long as what is kept of it
        job = _Job.from_buffer_copy(spans.kept.get(name, lambda: _tables(spans, first_row_G)).job)
        job.q, job.out = q.data_ptr(), out.data_ptr()
        job.q_stride, job.out_stride = q.stride(0), out.stride(0)
        job.heads, job.key_heads, job.scale = heads, key_heads, scale
        job.key, job.tail, job.value = key, tail, value
        if self._library.bmla_attend(ctypes.byref(job), torch.get_num_threads()):
            raise MemoryError("no memory for the buffers of attention")
