"""Records in the interpreter: the reference's bytes and values, bit for bit."""

import pytest
import torch

from batchmla.attention.gqa import head_record
from batchmla.attention.hybrid_parts import hybrid_record
from batchmla.attention.sparse import key_record, latent_record
from batchmla.kernels.reference import sparse as plain
from batchmla.kernels.sparse_ops import Record
from batchmla.kernels.triton.records import read_record, write_record

PAGES, TOKENS = 3, 4
RECORDS = {
    "latent": latent_record(512, 64),
    "key": key_record(128),
    "v4": hybrid_record(512, 64),
    "heads": head_record(3, 80),
    "odd": Record(values=200, tile=128, tail=6),
    "padded": Record(values=70, tile=64, tail=2, has_e8m0=True, pad=3),
}
by_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
EXTREMES = (0.0, -0.0, 448.0, 449.0, 1e-4, 9.9e-5, 3e38, 2.0**-6, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9)


def cache(record: Record) -> torch.Tensor:
    return torch.randint(256, (PAGES, TOKENS, record.num_bytes), dtype=torch.uint8)


def rows(record: Record) -> torch.Tensor:
    """Rows of every magnitude; the first mixes numbers at borders of the format."""
    found = torch.randn(7, record.width + 9) * torch.logspace(-6, 6, 7)[:, None]
    edges = torch.tensor(EXTREMES).repeat(found.shape[1] // len(EXTREMES) + 1)
    found[0] = edges[: found.shape[1]]
    found[1] = torch.randn(found.shape[1]).exp2() * 2.0**-8
    return found


@by_record
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_the_references(record: Record, dtype: torch.dtype) -> None:
    found, given = cache(record), rows(record).to(dtype)[:, 5 : 5 + record.width]
    wanted, slots = found.clone(), torch.randperm(PAGES * TOKENS)[:7]
    plain.write_record(wanted, slots, given, record)
    write_record(found, slots, given, record)
    assert torch.equal(found, wanted)


@by_record
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_the_references(record: Record, dtype: torch.dtype) -> None:
    kept, slots = cache(record), torch.tensor([0, 2, 5, 6, 6])
    plain.write_record(kept, torch.arange(7), rows(record)[:, : record.width], record)
    want = plain.read_record(kept, slots, record, dtype)
    assert torch.equal(read_record(kept, slots, record, dtype).nan_to_num(1.25),
                       want.nan_to_num(1.25))  # fmt: skip


def test_every_code_is_read_and_written_back() -> None:
    record = Record(values=256, tile=256)
    kept = torch.zeros(1, 1, record.num_bytes, dtype=torch.uint8)
    kept[0, 0, :256] = torch.arange(256, dtype=torch.uint8)
    kept[0, 0, 256:] = torch.tensor([1.0]).view(torch.uint8)
    slots = torch.tensor([0])
    values = read_record(kept, slots, record, torch.float32)
    want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(values[0].nan_to_num(999.0), want.nan_to_num(999.0))
    again = torch.zeros_like(kept)
    write_record(again, slots, values, record)
    assert torch.equal(again, kept)


def test_a_row_that_is_no_number_stays_none() -> None:
    """So that its attention is not finite, which is how a broken row is found."""
    record = RECORDS["latent"]
    given = torch.randn(2, record.width)
    given[0, 3], given[1, 200] = torch.nan, -torch.inf
    kept = cache(record)
    write_record(kept, torch.tensor([1, 2]), given, record)
    values = read_record(kept, torch.tensor([1, 2]), record, torch.float32)
    assert values[0, 3].isnan() and values[1, 200] == -torch.inf


def test_slots_outside_the_cache() -> None:
    record = RECORDS["v4"]
    guarded = torch.zeros(PAGES + 2, TOKENS, record.num_bytes, dtype=torch.uint8)
    kept = guarded[1:-1]
    slots = torch.tensor([-1, PAGES * TOKENS, 2**40, 5])
    write_record(kept, slots, torch.ones(4, record.width), record)
    values = read_record(kept, slots, record, torch.bfloat16)
    assert not values[:3].any() and values[3].eq(1).all()
    kept[1] = 0
    assert not guarded.any(), "bytes outside of the slot's page"


def test_offsets_beyond_31_bits() -> None:
    record = RECORDS["key"]
    page_bytes = TOKENS * record.num_bytes
    far = torch.empty(2**31 + 2 * page_bytes, dtype=torch.uint8)
    shape = (2, TOKENS, record.num_bytes)
    kept = far.as_strided(shape, (2**31 + 64, record.num_bytes, 1))
    given = torch.randn(1, record.width)
    near = cache(record)
    write_record(kept, torch.tensor([TOKENS + 1]), given, record)
    plain.write_record(near, torch.tensor([1]), given, record)
    found = read_record(kept, torch.tensor([TOKENS + 1]), record, torch.float32)
    assert torch.equal(found, plain.read_record(near, torch.tensor([1]), record, torch.float32))
