"""Times of kernels at the sizes of real models, beside the least time that the device's ceilings
leave for their bytes and flops, and beside baselines measured in the same run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from batchmla import kernels
from batchmla.kernels.groups import Groups, Spans
from batchmla.kernels.ops import MlaDims, Ops, Packed, PackKind, RouterDims
from batchmla.kernels.quant import Coding
from gpu.baseline_mla import baseline_mla_decode
from gpu.checks import codes_there, quantised_stack
from gpu.place import Place

BF16 = torch.bfloat16
NOBODY = Groups(members=())
Run = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one size. `rate`: of the ceiling that its flops are held against; `target`:
    the share of the floor that it is to reach."""

    name: str
    run: Run
    nbytes: float
    flops: float
    target: float
    rate: str = "bf16"
    baselines: tuple[tuple[str, Run], ...] = ()


def spans_of(pages_GP: np.ndarray[Any, Any], keys: int, queries: int, page: int) -> Groups:
    """Equal sequences, each on pages of its own."""
    count = len(pages_GP)
    spans = Spans(
        first_row_G=np.arange(count) * queries, num_queries_G=np.full(count, queries),
        num_keys_G=np.full(count, keys), table_row_G=np.arange(count), pages_GP=pages_GP,
        page_tokens=page,
    )  # fmt: skip
    return Groups(members=(), spans=(spans,))


def random(place: Place, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal values, made where they are."""
    return (torch.randn(shape, device=place.device) * scale).to(BF16)


def mla_cases(place: Place, ops: Ops) -> Iterator[Case]:
    """Decode steps in the latent form."""
    rows, keys = place.size(256, 2), place.size(4096, 40)
    for heads, target in ((16, 0.8), (128, 0.45)):
        dims = MlaDims(
            heads=heads if not place.is_dry else 4, nope=place.size(128, 16),
            rope=place.size(64, 16), value=place.size(128, 16), latent=place.size(512, 32),
            scale=0.07,
        )  # fmt: skip
        width = dims.latent + dims.rope
        per_row = -(-keys // 64)
        cache = random(place, rows * per_row, 64, width)
        pages = np.random.default_rng(0).permutation(rows * per_row).reshape(rows, per_row)
        q = random(place, rows, dims.heads, dims.nope + dims.rope)
        shape = dims.heads * (dims.nope + dims.value), dims.latent
        kv_b = Packed(PackKind.LATENT, shape, random(place, *shape, scale=0.05))
        groups = spans_of(pages, keys, 1, 64)
        latent_q = random(place, rows, dims.heads, width)
        table = torch.from_numpy(pages).to(place.device)
        lengths = torch.full((rows,), keys, device=place.device)
        pairs = rows * keys * dims.heads
        yield Case(
            name=f"mla decode {dims.heads} heads, {rows} x {keys}",
            run=lambda q=q, cache=cache, kv_b=kv_b, groups=groups, dims=dims: ops.mla(
                q, cache, kv_b, groups, NOBODY, dims
            ),
            nbytes=2.0 * rows * keys * width + 4.0 * shape[0] * shape[1],
            flops=2.0 * pairs * (width + dims.latent) + 2.0 * rows * shape[0] * shape[1],
            target=target,
            baselines=(
                (
                    "heads on M, 4 splits",
                    lambda q=latent_q, cache=cache, table=table, lengths=lengths, dims=dims: (
                        baseline_mla_decode(q, cache, table, lengths, dims.latent, dims.scale)
                    ),
                ),
            ),
        )


def gqa_cases(place: Place, ops: Ops) -> Iterator[Case]:
    """Decode steps and one prompt, 32 heads over 8 of 128."""
    rows, keys, width = place.size(256, 2), place.size(4096, 40), place.size(128, 16)
    for count, queries, keys_each, target in (
        (rows, 1, keys, 0.8), (1, place.size(4096, 20), place.size(4096, 20), 0.55),
    ):  # fmt: skip
        per_row = -(-keys_each // 64)
        caches = [random(place, count * per_row, 64, 8 * width) for _ in range(2)]
        pages = np.arange(count * per_row).reshape(count, per_row)
        q = random(place, count * queries, 32, width)
        groups = spans_of(pages, keys_each, queries, 64)
        pairs = count * 32 * (queries * (keys_each - queries) + queries * (queries + 1) / 2)
        whole = [random(place, 1, 32, queries, width) for _ in range(3)]
        baselines: tuple[tuple[str, Run], ...] = ()
        if queries > 1:
            baselines = (
                (
                    "scaled_dot_product_attention",
                    lambda whole=whole: F.scaled_dot_product_attention(*whole, is_causal=True),
                ),
            )
        yield Case(
            name=f"gqa {count} x {queries} of {keys_each}",
            run=lambda q=q, caches=caches, groups=groups: ops.gqa(q, *caches, groups, 0.09),
            nbytes=2.0 * count * keys_each * 16 * width,
            flops=4.0 * pairs * width,
            target=target,
            baselines=baselines,
        )


def expert_cases(place: Place, ops: Ops) -> Iterator[Case]:
    """V2-Lite's experts in bfloat16; R1's on one of eight GPUs in e4m3."""
    for coding, count, width, ffn, active in (
        (None, 64, 2048, 1408, 6), (Coding.E4M3, 32, 7168, 2048, 8),
    ):  # fmt: skip
        if place.is_dry:
            count, width, ffn, active = 8, 128, 128, 4
        shapes = {
            PackKind.EXPERTS_UP: (count, 2 * ffn, width),
            PackKind.EXPERTS_DOWN: (count, width, ffn),
        }
        packed = []
        for kind, shape in shapes.items():
            weight = (
                random(place, *shape, scale=0.02) if coding is None
                else codes_there(place, quantised_stack(coding, shape))
            )  # fmt: skip
            packed.append(ops.pack(kind, weight))
        itemsize = 2 if coding is None else 1
        weight_bytes = float(itemsize) * 3 * count * ffn * width
        for tokens, target in ((place.size(64, 4), 0.8), (place.size(8192, 12), 0.6)):
            x = random(place, tokens, width)
            ids = torch.stack([torch.randperm(count)[:active] for _ in range(tokens)])
            scores = torch.rand(tokens, active)
            args = x, place.put(scores), place.put(ids), *packed
            baselines: tuple[tuple[str, Run], ...] = ()
            if coding is None and not place.is_dry:
                baselines = (("grouped_mm", _grouped(place, args, count)),)
            yield Case(
                name=f"experts {coding.value if coding else 'bf16'} {count} x {tokens} tokens",
                run=lambda args=args: ops.experts(*args),
                nbytes=weight_bytes,
                flops=6.0 * tokens * active * ffn * width,
                target=target,
                rate="bf16" if coding is None else "fp8",
                baselines=baselines,
            )


def _grouped(place: Place, args: tuple[Any, ...], count: int) -> Run:
    """Both products of all experts by torch, rows sorted beforehand."""
    x, _, ids, up, down = args
    flat = ids.flatten()
    order = flat.argsort()
    rows = x[order // ids.shape[1]]
    ends = torch.bincount(flat, minlength=count).cumsum(0).to(torch.int32)
    up_EMF, down_EFM = (each.plain.transpose(1, 2) for each in (up, down))

    def run() -> torch.Tensor:
        gate, each = torch._grouped_mm(rows, up_EMF, offs=ends).chunk(2, dim=1)
        return torch._grouped_mm(F.silu(gate) * each, down_EFM, offs=ends)

    return run


def row_cases(place: Place, ops: Ops) -> Iterator[Case]:
    """What passes over rows once: bound by bytes."""
    rows, width = place.size(8192, 4), place.size(7168, 96)
    x, residual, weight = (random(place, *shape) for shape in ((rows, width),) * 2 + ((width,),))
    yield Case(
        name=f"add_norm {rows}x{width}", run=lambda: ops.add_norm(x, residual, weight, 1e-6),
        nbytes=8.0 * rows * width, flops=0, target=0.85,
    )  # fmt: skip
    gate_up = random(place, place.size(65_536, 4), place.size(4096, 64))
    yield Case(
        name="act_mul", run=lambda: ops.act_mul(gate_up), nbytes=3.0 * gate_up.numel(), flops=0,
        target=0.85,
    )  # fmt: skip
    dims = RouterDims(active=8, normalise=True, scale=2.5, groups=8, kept_groups=4)
    x_TM = random(place, rows, place.size(256, 32))
    gate = torch.randn(256, x_TM.shape[1], device=place.device)
    bias = torch.zeros(256, device=place.device)
    yield Case(
        name=f"route {rows}x256", run=lambda: ops.route(x_TM, gate, bias, dims),
        nbytes=2.0 * x_TM.numel() + 4.0 * gate.numel(), flops=2.0 * rows * gate.numel(), target=0.1,
    )  # fmt: skip
    count, vocab = place.size(512, 3), place.size(129_280, 500)
    logits = torch.randn(count, vocab, device=place.device)
    knobs = {
        "temperature_N": torch.full((count,), 0.7, dtype=torch.float64),
        "top_k_N": torch.zeros(count, dtype=torch.int64),
        "top_p_N": torch.full((count,), 0.95, dtype=torch.float64),
        "min_p_N": torch.zeros(count, dtype=torch.float64),
        "uniform_N": torch.rand(count, dtype=torch.float64),
    }
    there = {name: place.put(value) for name, value in knobs.items()}
    yield Case(
        name=f"sample {count}x{vocab}", run=lambda: ops.sample(logits, **there),
        nbytes=4.0 * count * vocab, flops=0, target=0.2,
        baselines=(("one sort", lambda: torch.sort(logits, dim=1)),),
    )  # fmt: skip


def measure(place: Place, ceilings: dict[str, float]) -> dict[str, Any]:
    """By kernel: seconds, floor, share, target, and the baselines' seconds over ours."""
    torch.manual_seed(0)
    ops = kernels.load("triton")
    found: dict[str, Any] = {}
    for part in (mla_cases, expert_cases, gqa_cases, row_cases):
        try:
            for case in part(place, ops):
                found[case.name] = timed(place, case, ceilings)
        except Exception as fault:  # of one part: the others are measured
            found[part.__name__] = {"fault": f"{type(fault).__name__}: {fault}"[:500]}
    return found


def timed(place: Place, case: Case, ceilings: dict[str, float]) -> dict[str, Any]:
    """One case."""
    seconds = place.seconds(case.run)
    floor_s = max(case.nbytes / ceilings["bytes"], case.flops / ceilings[case.rate])
    told: dict[str, Any] = {
        "us": seconds * 1e6, "gb_per_s": case.nbytes / seconds / 1e9,
        "tflops": case.flops / seconds / 1e12, "floor_us": floor_s * 1e6,
        "share": floor_s / seconds, "target": case.target,
        "is_met": None if place.is_dry else floor_s / seconds >= case.target,
    }  # fmt: skip
    for name, run in case.baselines:
        told[f"{name}: times ours"] = place.seconds(run) / seconds
    return told
