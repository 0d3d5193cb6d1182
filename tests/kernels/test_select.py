"""The compiled choice of keys: the reference's sets at odd sizes, rows alone, bad numbers."""

from dataclasses import replace

import pytest
import torch

from batchmla import kernels
from batchmla.attention.sparse import key_record
from batchmla.kernels.ops import Ops
from batchmla.kernels.sparse_ops import IndexGroup, Record

# (rows, keys that the last one sees, keys of a page, heads, width, keys chosen)
SIZES = [
    (1, 9, 8, 4, 32, 8),
    (5, 70, 16, 16, 32, 8),
    (9, 70, 24, 17, 64, 40),
    (13, 300, 64, 64, 96, 40),
    (4, 515, 136, 100, 128, 300),
    (3, 64, 64, 64, 32, 62),  # the first row takes all that it sees
    (9, 34000, 256, 3, 32, 2048),  # more scores than rows of a unit may keep
]


@pytest.fixture(scope="module")
def ops() -> Ops:
    made = kernels.load("cpu")
    if made.name.startswith("cpu by torch"):
        pytest.skip(made.name)
    return made


class Case:
    """Rows at the end of one sequence, or each of its own, on shuffled pages."""

    def __init__(self, sizes: tuple[int, ...], *, is_shared: bool, has_ties: bool = False) -> None:
        rows, keys, page_rows, heads, width, self.count = sizes
        source = torch.Generator().manual_seed(keys)

        def make(*shape: int) -> torch.Tensor:
            if has_ties:  # small integers: every score is exact
                return torch.randint(-1, 2, shape, generator=source).float()
            return torch.randn(shape, generator=source)

        tables, num_pages = 1 if is_shared else rows, -(-keys // page_rows)
        used = tables * num_pages
        self.q = make(rows, heads, width).bfloat16()
        self.weights = make(rows, heads)
        self.cache = make(used + 2, page_rows, width).bfloat16()
        self.record: Record | None = None
        self.group = IndexGroup(
            first_row=0,
            num_rows=rows,
            num_keys=keys,
            pages_GP=torch.randperm(used + 2, generator=source)[:used].view(tables, num_pages),
            visible_N=torch.arange(keys - rows + 1, keys + 1),
        )

    def as_records(self, ops: Ops) -> None:
        """The cache as bytes, with factors far from 1."""
        num_pages, page_rows, width = self.cache.shape
        self.record = key_record(width)
        factors_P11 = torch.where(torch.arange(num_pages) % 2 == 0, 0.01, 3000.0)[:, None, None]
        rows = (self.cache * factors_P11).flatten(0, 1)
        shape = (num_pages, page_rows, self.record.num_bytes)
        self.cache = torch.zeros(shape, dtype=torch.uint8)
        ops.sparse.write_record(self.cache, torch.arange(len(rows)), rows, self.record)

    def select(self, ops: Ops, groups: tuple[IndexGroup, ...] | None = None) -> torch.Tensor:
        return ops.sparse.select_keys(
            self.q, self.weights, self.cache, groups or (self.group,), self.count, self.record
        )


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ties_go_to_the_lowest_positions_as_in_the_reference(
    ops: Ops, sizes: tuple[int, ...], is_shared: bool, is_recorded: bool
) -> None:
    case = Case(sizes, is_shared=is_shared, has_ties=True)
    if is_recorded:
        case.as_records(ops)
    # the reference sorts lists; torch's form is held against it elsewhere
    oracle = kernels.load("torch" if case.group.num_keys > 1000 else "reference")
    assert torch.equal(case.select(ops), case.select(oracle))


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_largest_scores_are_chosen(
    ops: Ops, sizes: tuple[int, ...], is_shared: bool, is_recorded: bool
) -> None:
    case = Case(sizes, is_shared=is_shared)
    keys = case.cache
    if is_recorded:
        case.as_records(ops)
        assert case.record is not None
        everywhere = torch.arange(keys.shape[0] * keys.shape[1])
        keys = ops.sparse.read_record(case.cache, everywhere, case.record, torch.float32)
        keys = keys.view(*case.cache.shape[:2], -1)
    places = torch.arange(keys.shape[0] * keys.shape[1]).view(keys.shape[:2])
    for row, slots_K in enumerate(case.select(ops)):
        pages_P = case.group.pages_GP[0 if is_shared else row]
        seen = places[pages_P].flatten()[: int(case.group.visible_N[row])]
        k_LD = keys.flatten(0, 1)[seen].double()
        dots_IL = (case.q[row].double() @ k_LD.T).clamp(min=0)
        scores_L = case.weights[row].double() @ dots_IL
        bound_L = case.weights[row].abs().double() @ dots_IL  # rounding grows with these
        is_chosen = torch.isin(seen, slots_K)
        assert seen[is_chosen].tolist() == slots_K.tolist(), "not in the order of positions"
        if not is_chosen.all():
            missed = scores_L[~is_chosen].max() - scores_L[is_chosen].min()
            assert missed <= 1e-6 * bound_L.max()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_row_chooses_alike_alone_and_among_others(
    ops: Ops, sizes: tuple[int, ...], threads: int
) -> None:
    case, before = Case(sizes, is_shared=True), torch.get_num_threads()
    together = case.select(ops)
    alone = [
        replace(
            case.group,
            first_row=row,
            num_rows=1,
            num_keys=int(case.group.visible_N[row]),
            visible_N=case.group.visible_N[row : row + 1],
        )
        for row in range(case.group.num_rows)
    ]
    tables = case.group.pages_GP.expand(case.group.num_rows, -1).contiguous()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(case.select(ops, tuple(alone)), together)
        assert torch.equal(case.select(ops, (replace(case.group, pages_GP=tables),)), together)
        assert torch.equal(case.select(ops), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_shared", [False, True])
def test_bad_numbers_count_as_the_smallest(ops: Ops, is_shared: bool) -> None:
    """In a row's weights, in its queries, in a key, and as an infinity."""
    case = Case(SIZES[3], is_shared=is_shared)
    before = case.select(ops)
    case.weights[2, 5] = torch.nan
    case.q[4, 3, 7] = torch.nan
    after = case.select(ops)
    for row in (2, 4):
        pages_P = case.group.pages_GP[0 if is_shared else row]
        places = torch.arange(case.count)
        assert after[row].tolist() == (pages_P[places // 64] * 64 + places % 64).tolist()
    others = [row for row in range(13) if row not in (2, 4)]
    assert torch.equal(after[others], before[others])
    for value in (torch.nan, torch.inf, -torch.inf):
        page = int(case.group.pages_GP[0, 1])
        case.cache[page, 3, 11] = value
        assert torch.equal(case.select(ops), case.select(kernels.load("reference"))), value


def test_both_zeros_are_equal(ops: Ops) -> None:
    """A head with a weight below 0 and no positive dot gives -0."""
    case = Case((2, 40, 8, 1, 32, 8), is_shared=True)
    case.q.fill_(1)
    case.weights.fill_(-1)
    case.cache = -case.cache.abs()
    case.cache[::2] = case.cache[::2].abs() * 0 + 1  # every second page scores -32
    assert torch.equal(case.select(ops), case.select(kernels.load("reference")))
    case.weights[0] = 1  # its zeros are 0 then
    assert torch.equal(case.select(ops), case.select(kernels.load("reference")))


@pytest.mark.parametrize("width", [16, 48])
def test_other_widths_go_to_torch(ops: Ops, width: int) -> None:
    case = Case((5, 70, 16, 16, width, 8), is_shared=True, has_ties=True)
    assert torch.equal(case.select(ops), case.select(kernels.load("reference")))


def test_exact_mode_is_served_too(ops: Ops) -> None:
    case = Case(SIZES[3], is_shared=False)
    assert torch.equal(case.select(kernels.load("cpu", exact=True)), case.select(ops))
