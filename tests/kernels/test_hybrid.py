"""DeepSeek-V4's ops: both back ends against float64, and rows of the exact one by themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close

from batchmla import kernels
from batchmla.kernels.hybrid_ops import HybridRows
from batchmla.kernels.ops import Ops, PackKind

BACKENDS = ("cpu", "reference", "exact")
DTYPES = [torch.float32, torch.bfloat16]
HEADS, WIDTH, WINDOW, ENTRIES = 4, 32, 8, 16


def load(backend: str) -> Ops:
    return kernels.load("cpu", exact=True) if backend == "exact" else kernels.load(backend)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Reads:
    """Rows that read windows of other lengths, some with entries."""

    def __init__(self, num_rows: int, dtype: torch.dtype) -> None:
        self.q = random(num_rows, HEADS, WIDTH).to(dtype)
        self.window = random(50, WIDTH, seed=1).to(dtype)
        self.entries = random(9, 4, WIDTH, seed=2).to(dtype)
        self.sink = random(HEADS, seed=3) * 3
        source = torch.Generator().manual_seed(4)
        self.rows = HybridRows(
            window_NW=torch.randint(0, 50, (num_rows, WINDOW), generator=source),
            window_count_N=torch.randint(1, WINDOW + 1, (num_rows,), generator=source),
            slots_NK=torch.randint(0, 36, (num_rows, ENTRIES), generator=source),
            entry_count_N=torch.randint(0, ENTRIES + 1, (num_rows,), generator=source),
        )

    def taken(self, some: slice) -> tuple[torch.Tensor, HybridRows]:
        rows = self.rows
        assert rows.slots_NK is not None and rows.entry_count_N is not None
        return self.q[some], HybridRows(
            window_NW=rows.window_NW[some], window_count_N=rows.window_count_N[some],
            slots_NK=rows.slots_NK[some], entry_count_N=rows.entry_count_N[some],
        )  # fmt: skip

    def run(self, ops: Ops, some: slice = slice(None)) -> torch.Tensor:
        q, rows = self.taken(some)
        args = (self.entries, rows, self.sink, 0.2, None)
        return ops.hybrid.attend(q, self.window, *args)

    def expected(self) -> torch.Tensor:
        assert self.rows.slots_NK is not None and self.rows.entry_count_N is not None
        found = []
        for row, q in enumerate(self.q.double()):
            near = self.rows.window_NW[row, : int(self.rows.window_count_N[row])]
            far = self.rows.slots_NK[row, : int(self.rows.entry_count_N[row])]
            read = torch.cat((self.window[near], self.entries.flatten(0, 1)[far])).double()
            scores = torch.cat((q @ read.T * 0.2, self.sink.double()[:, None]), dim=1)
            found.append(scores.softmax(1)[:, :-1] @ read)
        return torch.stack(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_rows", [1, 70])
def test_windows_entries_and_sinks(backend: str, dtype: torch.dtype, num_rows: int) -> None:
    reads = Reads(num_rows, dtype)
    assert_close("attend", reads.run(load(backend)), reads.expected(), scale=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gate_of_minus_infinity_leaves_its_value_out(backend: str) -> None:
    values, gates = random(5, 8, 12), random(5, 8, 12, seed=1) * 5
    gates[2, :4] = -torch.inf
    expected = (gates.double().softmax(1) * values.double()).sum(1)
    assert_close("pool", load(backend).hybrid.pool(values, gates), expected, scale=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_follow_scores_or_a_table(backend: str) -> None:
    ops = load(backend).hybrid
    logits, bias = random(30, 9) * 6, random(9, seed=1)
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    table = torch.stack([torch.randperm(9)[:3] for _ in range(30)])
    for given in (None, table):
        weights, ids = ops.route_scores(logits, bias, given, 3, 1.5)
        wanted = (scores + bias.double()).topk(3).indices if given is None else given
        assert torch.equal(ids.sort(1).values, wanted.sort(1).values)
        picked = scores.gather(1, ids)
        assert_close("weights", weights, picked / picked.sum(1, keepdim=True) * 1.5, scale=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_are_clamped(backend: str, dtype: torch.dtype) -> None:
    ops, limit = load(backend), 0.5
    up, down = random(6, 64, 32).to(dtype), random(6, 32, 32, seed=1).to(dtype) * 0.2
    x = random(40, 32, seed=2).to(dtype)
    weights = random(40, 2, seed=3).abs()
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(40)])
    packed = ops.pack(PackKind.EXPERTS_UP, up), ops.pack(PackKind.EXPERTS_DOWN, down)
    actual = ops.hybrid.clamped_experts(x, weights, ids, *packed, limit)
    expected = torch.zeros(40, 32, dtype=torch.float64)
    for token in range(40):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            gate, value = (up[expert].double() @ x[token].double()).chunk(2)
            gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
            hidden = gate * torch.sigmoid(gate) * value
            expected[token] += weight * (down[expert].double() @ hidden)
    assert_close("experts", actual, expected, scale=3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixing_weights_are_doubly_stochastic(backend: str) -> None:
    mixed, base, scale = random(20, 24) * 3, random(24, seed=1), random(3, seed=2)
    pre, post, mix = load(backend).hybrid.hyper_weights(mixed, base, scale, 4, 20, 1e-6)
    factors = scale.double().repeat_interleave(torch.tensor([4, 4, 16]))
    numbers = mixed.double() * factors + base.double()
    assert_close("pre", pre, numbers[:, :4].sigmoid() + 1e-6, scale=2)
    assert_close("post", post, 2 * numbers[:, 4:8].sigmoid(), scale=2)
    expected = numbers[:, 8:].view(-1, 4, 4).softmax(2) + 1e-6
    for index in range(20):
        if index:
            expected = expected / (expected.sum(2, keepdim=True) + 1e-6)
        expected = expected / (expected.sum(1, keepdim=True) + 1e-6)
    assert_close("mix", mix, expected, scale=4)
    assert (mix.sum(1) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_go_through_their_own_matrices(backend: str, dtype: torch.dtype) -> None:
    x, weight = random(33, 3, 40).to(dtype), (random(3, 24, 40, seed=1) * 0.1).to(dtype)
    expected = torch.einsum("tgx,gox->tgo", x.double(), weight.double())
    actual = load(backend).hybrid.group_linear(x, weight)
    assert_close("groups", actual, expected, scale=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_rows_do_not_depend_on_their_batch(dtype: torch.dtype) -> None:
    ops = load("exact")
    num_rows = 150
    reads = Reads(num_rows, dtype)
    x = random(num_rows, 3, 40, seed=5).to(dtype)
    weight = random(3, 24, 40, seed=6).to(dtype)
    up, down = random(6, 64, 40, seed=7).to(dtype), random(6, 40, 32, seed=8).to(dtype)
    packed = ops.pack(PackKind.EXPERTS_UP, up), ops.pack(PackKind.EXPERTS_DOWN, down)
    numbers = random(num_rows, 24, seed=9) * 4
    calls: dict[str, Callable[[slice], Any]] = {
        "attend": lambda some: reads.run(ops, some),
        "groups": lambda some: ops.hybrid.group_linear(x[some], weight),
        "scores": lambda some: ops.hybrid.route_scores(numbers[some], None, None, 3, 1.0)[0],
        "experts": lambda some: ops.hybrid.clamped_experts(
            x[some, 0],
            *ops.hybrid.route_scores(numbers[some, :6], None, None, 2, 1.0),
            *packed,
            1.0,
        ),
        "mix": lambda some: ops.hybrid.hyper_weights(
            numbers[some], numbers[0], numbers[1, :3], 4, 5, 1e-6
        )[2],
        "pool": lambda some: ops.hybrid.pool(
            numbers[some].view(-1, 8, 3), numbers[some].flip(1).reshape(-1, 8, 3)
        ),
        "norm": lambda some: ops.sparse.layer_norm(x[some, 1], weight[0, 0], weight[0, 1], 1e-6),
    }
    for name, call in calls.items():
        whole, start = call(slice(0, num_rows)), 0
        for count in (1, 2, 7, 64, 76):
            part = call(slice(start, start + count))
            assert torch.equal(part, whole[start : start + count]), f"{name}: {count} rows differ"
            start += count
