"""Correctness of what V3.2, V4, Kimi-Linear and MiniMax-M3 add."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from triton_case import error
from triton_spans import latent_weight
from triton_sparse import make_choosing, recorded

from batchmla.attention.hybrid_parts import hybrid_record
from batchmla.attention.mla import latent_record
from batchmla.attention.sparse import key_record
from batchmla.kernels.block_sparse_ops import BlockDims
from batchmla.kernels.hybrid_ops import HybridRows
from batchmla.kernels.kda_ops import LaneRows
from batchmla.kernels.ops import MlaDims, Ops
from gpu.check import BF16, Check, compared, host, tensor
from gpu.place import Place

RECORD_BOUND = 5e-3


def records(place: Place) -> Iterator[Check]:
    """Bytes written must be the specification's, and what they stand for."""
    rows = place.size(512, 6)
    for name, record in (
        ("latent", latent_record(512, 64)), ("index key", key_record(128)),
        ("hybrid", hybrid_record(512, 64)),
    ):  # fmt: skip
        pages = -(-rows // 64)
        slots = torch.randperm(pages * 64)[:rows]
        cache = torch.zeros(pages, 64, record.num_bytes, dtype=torch.uint8)
        args = cache, slots, tensor(rows, record.width), record
        write = compared(lambda ops: ops.sparse.write_record, *args, changed=0)
        yield Check(f"write_record {name}", write, 0.0)
        full = recorded(tensor(pages * 64, record.width), record, 64)
        read = compared(lambda ops: ops.sparse.read_record, full, slots, record, BF16)
        yield Check(f"read_record {name}", read, 0.0)


def selected(place: Place, ours: Ops, spec: Ops) -> float:
    """The specification's keys, of float32 queries: how many sets differ."""
    count, heads, width = place.size(2048, 8), place.size(64, 4), place.size(128, 32)
    lengths = [(1, 5000), (3, 9000), (1, 2049)] if not place.is_dry else [(1, 40), (3, 70)]
    choosing = make_choosing(lengths, count, page_tokens=place.size(64, 8))
    keys = torch.randn(choosing.num_pages, choosing.page_tokens, width)
    q, weights = torch.randn(choosing.num_rows, heads, width), torch.rand(choosing.num_rows, heads)
    there = [
        replace(group, pages_GP=place.put(group.pages_GP), visible_N=place.put(group.visible_N))
        for group in choosing.groups
    ]
    args = q, weights, keys
    found = ours.sparse.select_keys(*map(place.put, args), there, count, None)
    wanted = spec.sparse.select_keys(*args, choosing.groups, count, None)
    differ = [
        len(set(one) ^ set(other)) / 2 / count
        for one, other in zip(found.tolist(), wanted.tolist(), strict=True)
    ]
    return max(differ)  # float32 sums in another order part near-ties


def sparse_mla(place: Place, ours: Ops, spec: Ops) -> float:
    """Plain rows, as many as V3.2 chooses."""
    real = not place.is_dry
    dims = MlaDims(
        heads=128 if real else 4, nope=128 if real else 16, rope=64 if real else 16,
        value=128 if real else 16, latent=512 if real else 32, scale=0.07,
    )  # fmt: skip
    pages, rows, count = place.size(64, 3), place.size(16, 3), place.size(2048, 30)
    cache = tensor(pages, 64, dims.latent + dims.rope)
    slots = torch.stack([torch.randperm(pages * 64)[:count] for _ in range(rows)])
    q, weight = tensor(rows, dims.heads, dims.nope + dims.rope), latent_weight(dims, BF16)
    assert weight.plain is not None
    there = replace(weight, plain=place.put(weight.plain))
    found = ours.sparse.sparse_mla(*map(place.put, (q, cache, slots)), there, dims, None)
    wide = replace(weight, plain=weight.plain.float())
    wanted = spec.sparse.sparse_mla(q.float(), cache.float(), slots, wide, dims, None)
    return error(host(found), wanted)


def hybrid(place: Place, ours: Ops, spec: Ops) -> float:
    """V4: a window, entries and a sink."""
    rows, heads, width = place.size(64, 16), place.size(64, 3), place.size(512, 64)
    window, entries = place.size(128, 12), place.size(512, 20)
    kept, pages = tensor(place.size(4096, 60), width), place.size(64, 4)
    cache = tensor(pages, 64, width)
    near = torch.randint(len(kept), (rows, window))
    far = torch.randint(pages * 64, (rows, entries))
    counts = torch.randint(1, window, (rows,)), torch.randint(0, entries, (rows,))

    def made(put: bool) -> HybridRows:
        parts = [place.put(each) if put else each for each in (near, counts[0], far, counts[1])]
        return HybridRows(
            window_NW=parts[0], window_count_N=parts[1], slots_NK=parts[2], entry_count_N=parts[3]
        )

    q, sink = tensor(rows, heads, width), torch.randn(heads)
    there = map(place.put, (q, kept, cache))
    found = ours.hybrid.attend(*there, made(True), place.put(sink), 0.05, None)
    wanted = spec.hybrid.attend(
        q.float(), kept.float(), cache.float(), made(False), sink, 0.05, None
    )
    return error(host(found), wanted)


def delta(place: Place, ours: Ops, spec: Ops) -> float:
    """Kimi-Linear's gated delta rule: chunks and single tokens."""
    heads, width = place.size(8, 2), place.size(128, 16)
    counts = [1, place.size(300, 9), 1, place.size(64, 5)]
    starts = np.concatenate(([0], np.cumsum(counts)))
    rows = LaneRows(
        starts_S1=starts, lanes_S=np.array([3, 1, 0, 2]),
        is_first_S=np.array([False, True, False, True]),
    )  # fmt: skip
    total = int(starts[-1])
    q, k, v = (torch.randn(total, heads, width) for _ in range(3))
    decay, beta = -torch.rand(total, heads, width), torch.rand(total, heads)
    state = torch.randn(4, heads, width * width)
    ours_state, spec_state = place.put(state).clone(), state.clone()
    found = ours.kda.delta(*map(place.put, (q, k, v, decay, beta)), ours_state, rows)
    wanted = spec.kda.delta(q, k, v, decay, beta, spec_state, rows)
    return max(error(host(found), wanted), error(host(ours_state), spec_state))


def blocks(place: Place, ours: Ops, spec: Ops) -> float:
    """MiniMax-M3: the specification's blocks, and attention over them."""
    dims = BlockDims(block_tokens=place.size(128, 8), count=place.size(16, 2), forced=1)
    width, key_heads = place.size(128, 16), 2
    lengths = [(1, 5000), (3, 9000)] if not place.is_dry else [(1, 40), (3, 70)]
    choosing = make_choosing(lengths, dims.num_keys, page_tokens=place.size(64, 8))
    shape = choosing.num_pages, choosing.page_tokens
    index = torch.randn(*shape, width)
    q = torch.randn(choosing.num_rows, key_heads, width)
    there = [
        replace(group, pages_GP=place.put(group.pages_GP), visible_N=place.put(group.visible_N))
        for group in choosing.groups
    ]
    found = host(ours.blocks.select(place.put(q), place.put(index), there, dims))
    wanted = spec.blocks.select(q, index, choosing.groups, dims)
    differ = float((found != wanted).any(dim=2).float().mean())
    keys, values = (tensor(*shape, key_heads * width) for _ in range(2))
    queries = tensor(choosing.num_rows, 4 * key_heads, width)
    args = (queries, keys, values)
    out = ours.blocks.attend(*map(place.put, args), there, place.put(wanted), dims, 0.1)
    wide = (each.float() for each in args)
    expected = spec.blocks.attend(*wide, choosing.groups, wanted, dims, 0.1)
    return max(differ, error(host(out), expected))


def sparse_checks(place: Place) -> Iterator[Check]:
    """All of them."""
    yield from records(place)
    yield Check("select_keys", selected, 2e-3)
    yield Check("sparse_mla", sparse_mla, RECORD_BOUND)
    yield Check("hybrid attend", hybrid, 2.5e-3)
    yield Check("blocks", blocks, RECORD_BOUND)
    yield Check("kda delta", delta, 1e-4)
    count, heads, width = place.size(256, 4), place.size(8, 2), place.size(128, 16)
    forget = tensor(count, heads * width), tensor(count, heads), torch.rand(heads)
    gates = compared(lambda ops: ops.kda.gates, *forget, torch.randn(heads * width))
    yield Check("kda gates", gates, 1e-5)
    gated = torch.randn(count, heads, width), tensor(count, heads, width), torch.randn(width), 1e-6
    yield Check("kda gated_norm", compared(lambda ops: ops.kda.gated_norm, *gated), 2.5e-3)
    places = torch.randint(count, (4, count))
    convolved = tensor(count, 64), torch.randn(64, 1, 4), places
    yield Check("kda convolve", compared(lambda ops: ops.kda.convolve, *convolved), 2.5e-3)
    streams = torch.randn(place.size(512, 4), 24)
    hyper = streams, torch.randn(24), torch.rand(3), 4, 20, 1e-6
    yield Check("hyper_weights", compared(lambda ops: ops.hybrid.hyper_weights, *hyper), 1e-5)
    values, gates = (torch.randn(place.size(256, 3), 8, 64) for _ in range(2))
    yield Check("pool", compared(lambda ops: ops.hybrid.pool, values, gates), 1e-5)
    scores = torch.randn(place.size(512, 4), 256)
    scored = compared(lambda ops: ops.hybrid.route_scores, scores, torch.rand(256), None, 6, 1.5)
    yield Check("route_scores", scored, 1e-5)
    gate_up = tensor(place.size(512, 4), 256)
    clamped = compared(lambda ops: ops.hybrid.clamped_act_mul, gate_up, 7.0)
    yield Check("clamped_act_mul", clamped, 2.5e-3)
