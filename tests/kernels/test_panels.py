"""Products of the compiled kernels: a row's bits are the same among any number of rows, on any
number of threads, whatever is asked for ahead of its time."""

from collections.abc import Iterator

import pytest
import torch
from compare import assert_close
from compiled import compiled_ops
from paged_case import make_case

from batchmla.attention.spans import read_in_place, whole_runs
from batchmla.kernels.ops import Ops, PackKind

BF16 = torch.bfloat16
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 95, 97, 255, 256, 257, 288, 300)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return compiled_ops()


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# one panel, part of one, one and a part, many; few and odd steps of depth; rows in chunks of 32
@pytest.mark.parametrize(
    ("outputs", "depth"),
    [(32, 32), (7, 96), (33, 4096), (100, 1056), (1000, 320), (64, 16416), (96, 8192)],
)
@pytest.mark.parametrize("kind", [PackKind.LINEAR, PackKind.LOGITS])
def test_a_linear_gives_a_row_the_same_bits_in_any_company(
    ops: Ops, num_threads: int, outputs: int, depth: int, kind: PackKind
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, depth, generator=generator).to(BF16)
    x = torch.randn(300, depth + 32, generator=generator).to(BF16)[:, 32:]
    bias = torch.randn(outputs, generator=generator).to(BF16)
    packed = ops.pack(kind, weight)
    whole = ops.linear(x, packed, bias)
    expected = x.double() @ weight.double().T + bias.double()
    assert_close("linear", whole.to(BF16), expected, scale=2)
    for count in ROWS:
        for first in {0, 300 - count}:
            part = ops.linear(x[first : first + count], packed, bias)
            assert torch.equal(part, whole[first : first + count]), (count, first)


@pytest.mark.parametrize(("width", "hidden"), [(64, 32), (96, 64), (1056, 160), (128, 1056)])
def test_experts_give_a_token_the_same_bits_in_any_company(
    ops: Ops, num_threads: int, width: int, hidden: int
) -> None:
    """Experts with no token, with one, with few, and with nearly all."""
    generator = torch.Generator().manual_seed(width)
    count, tokens = 7, 300
    up = torch.randn(count, 2 * hidden, width, generator=generator) * width**-0.5
    down = torch.randn(count, width, hidden, generator=generator) * hidden**-0.5
    packed = (
        ops.pack(PackKind.EXPERTS_UP, up.to(BF16)),
        ops.pack(PackKind.EXPERTS_DOWN, down.to(BF16)),
    )
    x = torch.randn(tokens, width, generator=generator).to(BF16)
    likely = torch.tensor([0.0, 40.0, 0.1, 1.0, 3.0, 0.0, 9.0])
    ids = torch.multinomial(likely.expand(tokens, -1), 3, generator=generator)
    ids[7, 0] = 5  # the only one
    assert set(torch.bincount(ids.flatten(), minlength=count)[[0, 5]].tolist()) == {0, 1}
    weights = torch.rand(tokens, 3, generator=generator)
    whole = ops.experts(x, weights, ids, *packed)
    gate_up = torch.einsum("tm,efm->tef", x.double(), up.to(BF16).double())
    gate, ups = gate_up.chunk(2, dim=-1)
    each = torch.einsum(
        "tef,emf->tem", torch.nn.functional.silu(gate) * ups, down.to(BF16).double()
    )
    picked = each.gather(1, ids[..., None].expand(-1, -1, width))
    assert_close("experts", whole, (picked * weights.double()[..., None]).sum(1), scale=2)
    for rows in ROWS:
        for first in {0, 3, 300 - rows}:
            some = slice(first, first + rows)
            part = ops.experts(x[some], weights[some], ids[some], *packed)
            assert torch.equal(part, whole[some]), (rows, first)


@pytest.mark.parametrize("batch", ["decodes behind one prefix", "two prefixes", "mixed"])
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (5, 1), (2, 17), (1, 40)])
def test_attention_gives_a_row_the_same_bits_on_any_number_of_threads(
    ops: Ops, batch: str, heads: int, key_heads: int
) -> None:
    """Heads whose keys lie side by side go to one thread, where there are enough for all."""
    width = 64
    case = make_case(batch, 2 * key_heads * width, BF16, page_tokens=16)
    key, value = (half.contiguous() for half in case.cache.chunk(2, dim=-1))
    q = torch.randn(len(case.step.tokens_T), heads * key_heads, width).to(BF16)
    runs, before, found = whole_runs(case.step), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(ops.gqa(q, key, value, read_in_place(case.step, runs), 0.3))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)
    for index in range(len(case.rows)):
        alone = read_in_place(case.step, runs.take(runs.sequence_G == index))
        rows = slice(*case.step.host_starts_S1[index : index + 2])
        assert torch.equal(ops.gqa(q, key, value, alone, 0.3)[rows], found[0][rows])
