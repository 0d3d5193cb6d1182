"""Chosen keys and attention over them: both back ends against float64 and a plain sort."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from compare import assert_close
from steps import Row, make_step

from batchmla import kernels
from batchmla.attention.sparse import key_record, latent_record
from batchmla.attention.sparse_rows import ChoosingRows, choosing_rows, early_part
from batchmla.kernels.ops import MlaDims, PackKind
from batchmla.kv.step import Step

PAGE_TOKENS = 8
BACKENDS = ("cpu", "reference")
COUNT = 8
# (tokens of the step, context) of each sequence
BATCHES = {
    "one decode": [(1, 9)],
    "decodes": [(1, n) for n in (1, 7, 8, 9, 10, 63, 64, 100, 257)],
    "equal decodes": [(1, 40)] * 5,
    "whole prompts": [(2, 2), (9, 9), (63, 63)],
    "across the border": [(5, 10), (8, 12), (3, 8), (3, 9)],
    "mixed": [(1, 9), (17, 40), (1, 257), (31, 31), (1, 1), (2, 100), (4, 8)],
}


def make_batch(batch: str) -> Step:
    """The sequences on shuffled pages."""
    sequences, source = BATCHES[batch], random.Random(batch)
    counts = [-(-context // PAGE_TOKENS) for _, context in sequences]
    pool = list(range(sum(counts) + 2))
    source.shuffle(pool)
    rows = [
        (
            Row([0] * context, [pool.pop() for _ in range(pages)], computed=context - queries),
            queries,
        )
        for (queries, context), pages in zip(sequences, counts, strict=True)
    ]
    return make_step(rows, PAGE_TOKENS)


@dataclass
class Place:
    """Where a row of the step stands: its sequence, and the slots that it sees."""

    sequence: int
    slots: list[int]


def places(step: Step) -> list[Place]:
    found = []
    for sequence in range(step.num_sequences):
        queries = int(step.host_starts_S1[sequence + 1] - step.host_starts_S1[sequence])
        context, pages = int(step.host_context_S[sequence]), step.pages_SP[sequence].tolist()
        slots = [pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS for at in range(context)]
        found += [Place(sequence, slots[: end + 1]) for end in range(context - queries, context)]
    return found


def chosen_rows(step: Step, count: int = COUNT) -> tuple[ChoosingRows, list[int]]:
    choosing = choosing_rows(step, count)
    assert choosing is not None
    rows_N = choosing.rows_N
    return choosing, list(range(len(step.tokens_T))) if rows_N is None else rows_N.tolist()


def num_slots(step: Step) -> int:
    return (int(step.pages_SP.max()) + 1) * PAGE_TOKENS


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("border", [1, 8, 40, 300])
def test_every_row_is_early_or_chooses(batch: str, border: int) -> None:
    step = make_batch(batch)
    early, early_rows = early_part(step, border)
    choosing = choosing_rows(step, border)
    all_rows = list(range(len(step.tokens_T)))
    late = [] if choosing is None else all_rows
    if choosing is not None and choosing.rows_N is not None:
        late = choosing.rows_N.tolist()
    positions = step.positions_T.tolist()
    assert sorted(late) == [row for row in all_rows if positions[row] >= border]
    if early is None:
        assert early_rows is None and len(late) == len(all_rows)
        return
    rows = all_rows if early_rows is None else early_rows.tolist()
    assert rows == [row for row in all_rows if positions[row] < border]
    assert early.positions_T.tolist() == [positions[row] for row in rows]
    assert len(early.tokens_T) == early.host_starts_S1[-1]
    expected = [place.slots for place in places(step)]
    assert [place.slots for place in places(early)] == [expected[row] for row in rows]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_go_to_the_lowest_positions(backend: str, batch: str) -> None:
    """Small integers: every score is exact, and most are equal to others."""
    step, (choosing, rows) = make_batch(batch), chosen_rows(make_batch(batch))
    source = torch.Generator().manual_seed(1)
    q_NID = torch.randint(-1, 2, (len(rows), 4, 6), generator=source).float()
    weights_NI = torch.randint(-2, 3, (len(rows), 4), generator=source) / 2
    keys = torch.randint(-1, 2, (num_slots(step), 6), generator=source).float()
    cache = keys.view(-1, PAGE_TOKENS, 6)
    ops = kernels.load(backend).sparse
    slots_NK = ops.select_keys(q_NID, weights_NI, cache, choosing.groups, COUNT, None)
    ties = 0
    for index, row in enumerate(rows):
        seen = places(step)[row].slots
        dots = (q_NID[index].double() @ keys[seen].double().T).clamp(min=0)
        scores = (weights_NI[index].double() @ dots).tolist()
        ranked = sorted(range(len(seen)), key=lambda at: (-scores[at], at))
        assert slots_NK[index].tolist() == [seen[at] for at in sorted(ranked[:COUNT])]
        ties += scores[ranked[COUNT - 1]] == scores[ranked[COUNT]]
    assert ties > 0


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "record"])
@pytest.mark.parametrize("backend", [*BACKENDS, "exact"])
def test_the_largest_scores_are_chosen(backend: str, kind: str) -> None:
    step, (choosing, rows) = make_batch("mixed"), chosen_rows(make_batch("mixed"))
    source = torch.Generator().manual_seed(2)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    q_NID = torch.randn(len(rows), 16, 32, generator=source).to(dtype)
    weights_NI = torch.randn(len(rows), 16, generator=source)
    keys = torch.randn(num_slots(step), 32, generator=source).to(dtype)
    ops = kernels.load("cpu", exact=True) if backend == "exact" else kernels.load(backend)
    cache, record = keys.view(-1, PAGE_TOKENS, 32), None
    if kind == "record":
        record = key_record(32)
        cache = torch.zeros(len(keys) // PAGE_TOKENS, PAGE_TOKENS, 36, dtype=torch.uint8)
        everywhere = torch.arange(len(keys))
        ops.sparse.write_record(cache, everywhere, keys, record)
        keys = ops.sparse.read_record(cache, everywhere, record, torch.float32)
    slots_NK = ops.sparse.select_keys(q_NID, weights_NI, cache, choosing.groups, COUNT, record)
    for index, row in enumerate(rows):
        seen = places(step)[row].slots
        dots = (q_NID[index].double() @ keys[seen].double().T).clamp(min=0)
        scores = dict(zip(seen, (weights_NI[index].double() @ dots).tolist(), strict=True))
        picked = slots_NK[index].tolist()
        assert picked == [slot for slot in seen if slot in set(picked)], "not in position order"
        least = min(scores[slot] for slot in picked)
        assert least >= max(s for slot, s in scores.items() if slot not in picked) - 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_numbers_stay_with_their_row(backend: str) -> None:
    """A row of no numbers still gets keys that it sees, and the others theirs."""
    step, (choosing, rows) = make_batch("mixed"), chosen_rows(make_batch("mixed"))
    q_NID = torch.randn(len(rows), 4, 6)
    weights_NI = torch.randn(len(rows), 4)
    cache = torch.randn(num_slots(step) // PAGE_TOKENS, PAGE_TOKENS, 6)
    ops = kernels.load(backend).sparse
    before = ops.select_keys(q_NID, weights_NI, cache, choosing.groups, COUNT, None)
    weights_NI[3] = torch.nan
    after = ops.select_keys(q_NID, weights_NI, cache, choosing.groups, COUNT, None)
    assert after[3].tolist() == places(step)[rows[3]].slots[:COUNT]
    others = torch.arange(len(rows)) != 3
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("backend", [*BACKENDS, "exact"])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_attention_over_chosen_rows(
    num_rows: int, backend: str, is_recorded: bool, dtype: torch.dtype
) -> None:
    dims = MlaDims(heads=3, nope=16, rope=8, value=24, latent=32, scale=0.2)
    q_NHD = torch.randn(num_rows, 3, 24).to(dtype)
    kv_b = (torch.randn(3 * 40, 32) * 32**-0.5).to(dtype)
    rows_XX = torch.randn(15 * PAGE_TOKENS, 40).to(dtype)
    slots_NK = torch.stack([torch.randperm(len(rows_XX))[:COUNT] for _ in range(num_rows)])
    ops = kernels.load("cpu", exact=True) if backend == "exact" else kernels.load(backend)
    cache, record = rows_XX.view(15, PAGE_TOKENS, 40), None
    if is_recorded:
        record = latent_record(32, 8)
        cache = torch.zeros(15, PAGE_TOKENS, record.num_bytes, dtype=torch.uint8)
        everywhere = torch.arange(len(rows_XX))
        ops.sparse.write_record(cache, everywhere, rows_XX, record)
        rows_XX = ops.sparse.read_record(cache, everywhere, record, dtype)
    packed = ops.pack(PackKind.LATENT, kv_b)
    actual = ops.sparse.sparse_mla(q_NHD, cache, slots_NK, packed, dims, record)
    up_HXC = kv_b.double().view(3, 40, 32)
    latent, pe = rows_XX[slots_NK].double().split((32, 8), dim=-1)
    k = torch.einsum("nkc,hxc->nkhx", latent, up_HXC[:, :16])
    k = torch.cat((k, pe[:, :, None].expand(-1, -1, 3, -1)), -1)
    v = torch.einsum("nkc,hwc->nkhw", latent, up_HXC[:, 16:])
    weights = (torch.einsum("nhd,nkhd->nhk", q_NHD.double(), k) * 0.2).softmax(-1)
    expected = torch.einsum("nhk,nkhw->nhw", weights, v).flatten(1)
    assert_close("sparse mla", actual, expected, scale=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norm_has_mean_and_bias(backend: str, dtype: torch.dtype) -> None:
    x = (torch.randn(7, 50) * 3 + 2).to(dtype)[:, 10:]
    weight, bias = torch.rand(40).to(dtype), torch.randn(40).to(dtype)
    actual = kernels.load(backend).sparse.layer_norm(x, weight, bias, 1e-6)
    wide = x.double()
    centred = wide - wide.mean(1, keepdim=True)
    expected = centred / (centred.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
    assert_close("layer norm", actual, expected * weight.double() + bias.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_rows_do_not_depend_on_their_batch(dtype: torch.dtype) -> None:
    """The same rows alone, among others and behind others: the same keys, the same bits."""
    ops = kernels.load("cpu", exact=True)
    dims = MlaDims(heads=4, nope=16, rope=8, value=16, latent=32, scale=0.2)
    packed = ops.pack(PackKind.LATENT, (torch.randn(4 * 32, 32) * 32**-0.5).to(dtype))
    pages = np.random.default_rng(0).permutation(120)
    index_cache = torch.randn(120, PAGE_TOKENS, 32).to(dtype)
    latent_cache = torch.randn(120, PAGE_TOKENS, 40).to(dtype)
    contexts = [70, 300, 64, 257, 90]
    lists, first = [], 0
    for context in contexts:
        num_pages = -(-context // PAGE_TOKENS)
        lists.append(pages[first : first + num_pages].tolist())
        first += num_pages
    q = {n: torch.randn(300, 16, 32).to(dtype) for n in range(5)}
    w = {n: torch.randn(300, 16) for n in range(5)}
    heads = {n: torch.randn(300, 4, 24).to(dtype) for n in range(5)}

    def run(schedule: list[tuple[int, int, int]]) -> dict[tuple[int, int], torch.Tensor]:
        """(sequence, first position, tokens) of one step → chosen slots and results by place."""
        rows = [
            (Row([0] * contexts[n], lists[n], computed=start), count)
            for n, start, count in schedule
        ]
        choosing, order = chosen_rows(make_step(rows, PAGE_TOKENS))
        everyone = [(n, at) for n, start, count in schedule for at in range(start, start + count)]
        keys = [everyone[row] for row in order]
        args = (torch.stack([source[n][at] for n, at in keys]) for source in (q, w))
        slots = ops.sparse.select_keys(*args, index_cache, choosing.groups, COUNT, None)
        q_NHD = torch.stack([heads[n][at] for n, at in keys])
        out = ops.sparse.sparse_mla(q_NHD, latent_cache, slots, packed, dims, None)
        both = torch.cat((slots.double(), out.double()), 1)
        return dict(zip(keys, both, strict=True))

    whole = run([(n, 20, contexts[n] - 20) for n in range(5)])
    others = [
        [(n, contexts[n] - 1, 1) for n in (3, 1, 0, 4)],
        [(1, 299, 1)],
        [(1, 100, 7), (3, 50, 130), (2, 63, 1), (0, 30, 40)],
        [(4, 20, 3)],
    ]
    for schedule in others:
        for place, row in run(schedule).items():
            assert torch.equal(whole[place], row), (schedule, place)
