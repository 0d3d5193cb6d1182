"""Correctness of every op on the device: against the specification, or float64, on the CPU.

A check makes its inputs on the CPU, runs the op on the device and returns the relative error; its
bound is the one that the interpreted tests hold, twice that where 8-bit tensor cores sum.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from expert_case import quantised
from triton_case import BOUNDS, error
from triton_spans import expected_gqa, expected_mla, latent_weight, make_paged, random

from batchmla import kernels
from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import (
    MlaDims,
    Ops,
    Packed,
    PackKind,
    RopeLayout,
    RouterDims,
    Scoring,
)
from batchmla.kernels.quant import Coding, Quantised
from gpu.check import BF16, Check, compared, host, tensor
from gpu.place import Place
from gpu.sparse_checks import sparse_checks

ROUND = BOUNDS[BF16]
NOBODY = Groups(members=())
HOSTILE = [(1, n) for n in (1, 63, 0, 64, 65)]


def mla(heads: int, sequences: list[tuple[int, int]], *, expands: bool, page: int = 64) -> Check:
    """Latent attention at R1's widths."""

    def run(place: Place, ours: Ops, _: Ops) -> float:
        wide = not place.is_dry
        dims = MlaDims(
            heads=heads if wide else 4, nope=128 if wide else 16, rope=64 if wide else 16,
            value=128 if wide else 16, latent=512 if wide else 32, scale=0.07,
        )  # fmt: skip
        lengths = sequences if wide else [(q, min(n, 70)) for q, n in sequences if q <= n or not n]
        paged = make_paged(lengths, dims.latent + dims.rope, BF16, page)
        q = random(paged.num_tokens, dims.heads, dims.nope + dims.rope, seed=1, dtype=BF16)
        weight = latent_weight(dims, BF16)
        assert weight.plain is not None
        there = replace(weight, plain=place.put(weight.plain))
        spans = paged.spans(is_expanded=expands)
        absorbed, expanded = (NOBODY, spans) if expands else (spans, NOBODY)
        args = place.put(q), place.put(paged.cache_PBW), there
        found = host(ours.mla(*args, absorbed, expanded, dims))
        alone = paged.spans([1], is_expanded=expands)
        first = paged.first_rows()[1]
        rows = slice(first, first + lengths[1][0])
        groups = (NOBODY, alone) if expands else (alone, NOBODY)
        again = host(ours.mla(*args, *groups, dims))
        if not torch.equal(found[rows], again[rows]):
            return float("inf")  # a row alone has other bits
        return error(found, expected_mla(paged, q, weight.plain, dims))

    form = "expanded" if expands else "absorbed"
    return Check(f"mla {form} {heads} heads, {_told(sequences)}", run, 2 * ROUND)


def gqa(heads: int, key_heads: int, sequences: list[tuple[int, int]]) -> Check:
    """Heads of 128."""

    def run(place: Place, ours: Ops, _: Ops) -> float:
        width = place.size(128, 16)
        lengths = [(q, min(n, 70)) for q, n in sequences] if place.is_dry else sequences
        paged = make_paged(lengths, 2 * key_heads * width, BF16, 64)
        q = random(paged.num_tokens, heads, width, seed=1, dtype=BF16)
        keys, values = (place.put(half.contiguous()) for half in paged.cache_PBW.chunk(2, dim=2))
        found = ours.gqa(place.put(q), keys, values, paged.spans(), 0.1)
        return error(host(found), expected_gqa(paged, q, key_heads, 0.1))

    return Check(f"gqa {heads}/{key_heads} heads, {_told(sequences)}", run, ROUND)


def _told(sequences: list[tuple[int, int]]) -> str:
    return " ".join(f"{queries}x{keys}" for queries, keys in sequences[:4])


def experts(place: Place, coding: Coding | None, count: int, tokens: int) -> Check:
    """`count` experts, 8 of them a token; of codes in blocks of 128 (e2m1: 32)."""
    width, ffn = place.size(2048, 128), place.size(1024, 128)
    count, tokens = place.size(count, 8), place.size(tokens, 5)
    shapes = {PackKind.EXPERTS_UP: (2 * ffn, width), PackKind.EXPERTS_DOWN: (width, ffn)}

    def run(on: Place, ours: Ops, spec: Ops) -> float:
        x = tensor(tokens, width)
        scores = torch.rand(tokens, 4)
        ids = torch.stack([torch.randperm(count)[:4] for _ in range(tokens)])
        made: list[tuple[Packed, Packed]] = []
        for kind, (outputs, inputs) in shapes.items():
            if coding is None:
                weight = tensor(count, outputs, inputs, scale=inputs**-0.5)
                made.append((spec.pack(kind, weight), ours.pack(kind, on.put(weight).clone())))
                continue
            codes = quantised_stack(coding, (count, outputs, inputs))
            plain = codes.expanded()
            made.append((spec.pack(kind, plain), ours.pack(kind, codes_there(on, codes))))
        (up, up_there), (down, down_there) = made
        found = ours.experts(on.put(x), on.put(scores), on.put(ids), up_there, down_there)
        wanted = spec.experts(x.float(), scores, ids, _wide(up), _wide(down))
        return error(host(found), wanted)

    told = "bf16" if coding is None else coding.value
    # hidden values and each expert's row are rounded too
    bound = 2 * ROUND if coding is None else 4 * ROUND
    if coding is Coding.E4M3:  # activations become e4m3 too; tensor cores sum 14 bits
        bound = 0.1
    return Check(f"experts {told}, {count} of {width}x{ffn}, {tokens} tokens", run, bound)


def quantised_stack(coding: Coding, shape: tuple[int, int, int]) -> Quantised:
    if coding is Coding.E4M3:
        return quantised(shape, coding, 128, row_block=128)
    return quantised(shape, coding, 32, scale_dtype=torch.uint8)


def codes_there(place: Place, codes: Quantised) -> Quantised:
    rows = codes.scale_row_O
    return replace(
        codes, codes=place.put(codes.codes), scales=place.put(codes.scales),
        scale_row_O=None if rows is None else place.put(rows),
    )  # fmt: skip


def _wide(packed: Packed) -> Packed:
    assert packed.plain is not None
    return replace(packed, plain=packed.plain.float())


def sampled(place: Place, ours: Ops, spec: Ops) -> float:
    """The reference's ids for the same random numbers: 0 if all agree."""
    rows, vocab = place.size(64, 3), place.size(129_280, 500)
    logits = torch.randn(rows, vocab) * 3
    wrong = 0
    for temperature, top_k, top_p, min_p in (
        (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 0.9, 0.0), (1.0, 0, 0.95, 0.02),
    ):  # fmt: skip
        knobs = {
            "temperature_N": torch.full((rows,), temperature, dtype=torch.float64),
            "top_k_N": torch.full((rows,), top_k),
            "top_p_N": torch.full((rows,), top_p, dtype=torch.float64),
            "min_p_N": torch.full((rows,), min_p, dtype=torch.float64),
            "uniform_N": torch.rand(rows, dtype=torch.float64),
        }
        there = {name: place.put(value) for name, value in knobs.items()}
        found = host(ours.sample(place.put(logits).clone(), **there))
        wrong += int((found != spec.sample(logits.clone(), **knobs)).sum())
    return float(wrong)


def small_ops(place: Place) -> Iterator[Check]:
    """Rows, rotations, writes, choices."""
    rows, width = place.size(512, 5), place.size(7168, 96)
    x, weight = tensor(rows, width), tensor(width)
    yield Check("norm", compared(lambda ops: ops.norm, x, weight, 1e-6), ROUND)
    yield Check(
        "add_norm", compared(lambda ops: ops.add_norm, x, tensor(rows, width), weight, 1e-6), ROUND
    )
    layer = tensor(width, dtype=torch.float32), tensor(width, dtype=torch.float32)
    yield Check(
        "layer_norm", compared(lambda ops: ops.sparse.layer_norm, x.float(), *layer, 1e-6), 1e-5
    )
    cos, sin = torch.rand(rows, 32), torch.rand(rows, 32)
    for layout in RopeLayout:
        run = compared(lambda ops: ops.rope, tensor(rows, 4, 64), cos, sin, layout, changed=0)
        yield Check(f"rope {layout.value}", run, ROUND)
    pages = place.size(64, 2)
    slots = torch.randperm(pages * 64)[:rows]
    cache = torch.zeros(pages, 64, 576, dtype=BF16)
    write = compared(lambda ops: ops.write, cache, slots, tensor(rows, 576), changed=0)
    yield Check("write", write, 0.0)
    latent = cache, slots, tensor(rows, 576), tensor(512), 1e-6, cos, sin
    yield Check("write_latent", compared(lambda ops: ops.write_latent, *latent, changed=0), ROUND)
    yield Check("act_mul", compared(lambda ops: ops.act_mul, tensor(rows, 256)), ROUND)
    router = RouterDims(active=8, normalise=True, scale=2.5, groups=8, kept_groups=4)
    gate = tensor(256, 128, dtype=torch.float32), torch.randn(256) / 10
    chosen = compared(lambda ops: ops.route, tensor(rows, 128), *gate, router)
    yield Check("route sigmoid", chosen, 1e-5)
    plain = RouterDims(active=6, normalise=False, scale=1.0, scoring=Scoring.SOFTMAX, group_best=1)
    chosen = compared(lambda ops: ops.route, tensor(rows, 128), gate[0][:64], None, plain)
    yield Check("route softmax", chosen, 1e-5)
    yield Check("sample", sampled, 0.0)


def all_checks(place: Place) -> Iterator[Check]:
    """Every op that V2, V3, R1, Qwen3 and Llama run; sparse and hybrid ones."""
    yield from small_ops(place)
    long = [(1, 1000), (1, 4096), *HOSTILE]
    for heads in (16, 32, 128):
        yield mla(heads, long, expands=False)
    chunks = [(5, 12), (200, 700), (2, 2), (64, 64)]
    yield mla(16, [(q, n) for q, n in chunks if not place.is_dry or q < 10], expands=True)
    yield gqa(32, 8, long)
    yield gqa(16, 16, [(5, 12), (40, 70)])
    yield experts(place, None, 64, 16)
    yield experts(place, None, 64, 1024)
    yield experts(place, Coding.E4M3, 64, 16)
    yield experts(place, Coding.E4M3, 64, 1024)
    yield experts(place, Coding.E2M1, 32, 64)
    yield from sparse_checks(place)


def measure(place: Place) -> dict[str, Any]:
    """Every check by name: error, bound, and whether it holds."""
    torch.manual_seed(0)
    ours, spec = kernels.load("triton"), kernels.load("reference")
    found: dict[str, Any] = {}
    for check in all_checks(place):
        try:
            value = check.run(place, ours, spec)
        except Exception as fault:  # one op's fault must not hide the others'
            found[check.name] = {"holds": False, "fault": f"{type(fault).__name__}: {fault}"[:500]}
            continue
        found[check.name] = {
            "error": value, "bound": check.bound, "holds": value <= check.bound,
        }  # fmt: skip
    return found
