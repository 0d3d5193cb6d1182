"""Attention over windows, entries and sinks against float64 on the same rounded inputs."""

from dataclasses import replace

import pytest
import torch
from triton_case import BOUNDS, error
from triton_sparse import far_pages, recorded

from batchmla import kernels
from batchmla.attention.hybrid_parts import hybrid_record
from batchmla.kernels.hybrid_ops import HybridRows
from batchmla.kernels.triton.hybrid import attend

PAGE_TOKENS, NUM_PAGES, NUM_WINDOW = 4, 40, 90
WINDOW, ENTRIES, SCALE = 20, 70, 0.2
# (window, entries) of each row
COUNTS = [(0, 0), (1, 0), (15, 1), (16, 16), (17, 63), (20, 64), (0, 65), (20, 70)]
NOWHERE = 2**40


class Reads:
    """Rows with the counts above; whatever no row reads holds NaN, and places beyond the counts
    are none."""

    def __init__(self, heads: int, width: int, dtype: torch.dtype, rope: int | None = None) -> None:
        self.record = None if rope is None else hybrid_record(width, rope)
        self.q = torch.randn(len(COUNTS), heads, width).to(dtype)
        self.window = torch.randn(NUM_WINDOW, width).to(dtype)
        self.plain = torch.randn(NUM_PAGES * PAGE_TOKENS, width).to(dtype)
        self.sink = torch.randn(heads) * 3
        near = torch.stack([torch.randperm(NUM_WINDOW)[:WINDOW] for _ in COUNTS])
        far = torch.stack([torch.randperm(len(self.plain))[:ENTRIES] for _ in COUNTS])
        unread = torch.ones(NUM_WINDOW, dtype=torch.bool)
        for row, (num_near, num_far) in enumerate(COUNTS):
            unread[near[row, :num_near]] = False
            near[row, num_near:] = NOWHERE
            far[row, num_far:] = NOWHERE
        self.window[unread] = torch.nan
        counts = torch.tensor(COUNTS)
        self.rows = HybridRows(
            window_NW=near, window_count_N=counts[:, 0].contiguous(), slots_NK=far,
            entry_count_N=counts[:, 1].contiguous(),
        )  # fmt: skip
        self.cache = self.plain.view(NUM_PAGES, PAGE_TOKENS, width)
        if self.record is not None:
            self.cache = recorded(self.plain, self.record, PAGE_TOKENS)
            read = kernels.load("torch").sparse.read_record
            self.plain = read(self.cache, torch.arange(len(self.plain)), self.record, dtype)

    def run(self, some: slice = slice(None)) -> torch.Tensor:
        rows = HybridRows(
            window_NW=self.rows.window_NW[some], window_count_N=self.rows.window_count_N[some],
            slots_NK=None if self.rows.slots_NK is None else self.rows.slots_NK[some],
            entry_count_N=None if self.rows.entry_count_N is None
            else self.rows.entry_count_N[some],
        )  # fmt: skip
        return attend(self.q[some], self.window, self.cache, rows, self.sink, SCALE, self.record)

    def expected(self, *, has_entries: bool = True) -> torch.Tensor:
        assert self.rows.slots_NK is not None
        found = []
        for row, (num_near, num_far) in enumerate(COUNTS):
            near = self.window[self.rows.window_NW[row, :num_near]]
            far = self.plain[self.rows.slots_NK[row, : num_far if has_entries else 0]]
            read, q = torch.cat((near, far)).double(), self.q[row].double()
            scores = torch.cat((q @ read.T * SCALE, self.sink.double()[:, None]), dim=1)
            found.append(scores.softmax(1)[:, :-1] @ read)
        return torch.stack(found)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(3, torch.float32), (3, torch.float16), *((heads, torch.bfloat16) for heads in (3, 20, 70))],
    ids=str,
)
def test_windows_entries_and_sinks(heads: int, dtype: torch.dtype) -> None:
    reads = Reads(heads, 32, dtype)
    out = reads.run()
    assert out.dtype == dtype and error(out, reads.expected()) <= BOUNDS[dtype]
    assert not out[0].any(), "a row that reads nothing"
    assert torch.equal(reads.run(slice(5, 6)), out[5:6]), "a row alone"


@pytest.mark.parametrize(
    ("heads", "width", "rope"),
    [(3, 32, 8), (3, 96, 16), (40, 128, 32), (8, 512, 64), (64, 512, 64)],
)
def test_entries_as_records(heads: int, width: int, rope: int) -> None:
    """Rows of the published width are of 448 values in tiles of 64 and a tail of 64."""
    reads = Reads(heads, width, torch.bfloat16, rope)
    some = slice(None) if width < 512 else slice(3, 6)
    assert error(reads.run(some), reads.expected()[some]) <= 3e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_entries_of_another_dtype(dtype: torch.dtype) -> None:
    reads = Reads(3, 32, torch.bfloat16)
    reads.cache = reads.cache.to(dtype)
    assert error(reads.run(), reads.expected()) <= BOUNDS[torch.bfloat16]


def test_bytes_are_read_where_the_device_has_no_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(3, 32, torch.bfloat16, 8)
    before = reads.run()
    monkeypatch.setattr("batchmla.kernels.triton.hybrid.coded", lambda bytes_X: bytes_X)
    assert torch.equal(reads.run(), before)


@pytest.mark.parametrize("form", ["absent", "empty"])
def test_windows_only(form: str) -> None:
    reads = Reads(3, 32, torch.bfloat16)
    wanted = reads.expected(has_entries=False)
    assert reads.rows.slots_NK is not None
    none = None if form == "absent" else reads.rows.slots_NK[:, :0]
    reads.rows = replace(reads.rows, slots_NK=none, entry_count_N=None)
    assert error(reads.run(), wanted) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("sink", [-torch.inf, -1e4, 1e4])
@pytest.mark.parametrize("heads", [3, 40])
def test_sinks_far_from_all_scores(heads: int, sink: float) -> None:
    """Without any weight, and with all of it; a row without keys stays zero."""
    reads = Reads(heads, 32, torch.bfloat16)
    reads.sink.fill_(sink)
    out = reads.run()
    if sink > 0:
        assert not out.any()
        return
    assert not out[0].any()
    assert error(out[1:], reads.expected()[1:]) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("heads", [3, 40])
def test_large_scores(heads: int) -> None:
    reads = Reads(heads, 32, torch.bfloat16)
    reads.q = reads.q * 1e4
    assert error(reads.run(), reads.expected()) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("rope", [None, 8])
def test_entries_may_lie_behind_32_bits(rope: int | None) -> None:
    reads = Reads(3, 32, torch.bfloat16, rope)
    far = far_pages(PAGE_TOKENS, reads.cache.shape[2], reads.cache.dtype)
    far.copy_(reads.cache[:3])
    reads.cache = far
    assert reads.rows.slots_NK is not None
    reads.rows.slots_NK.fmod_(3 * PAGE_TOKENS)
    assert (reads.rows.slots_NK >= 2 * PAGE_TOKENS).any()
    assert error(reads.run(), reads.expected()) <= 3e-3
