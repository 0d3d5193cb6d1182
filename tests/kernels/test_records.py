"""Cached rows as bytes, read back by a decoder that knows nothing but the tables of offsets."""

import struct

import numpy as np
import pytest
import torch

from batchmla import kernels
from batchmla.attention.hybrid_parts import hybrid_record
from batchmla.attention.sparse import key_record, latent_record
from batchmla.kernels.sparse_ops import Record

BACKENDS = ("cpu", "reference")
PAGE_TOKENS = 4
LATENT, KEY = latent_record(512, 64), key_record(128)
V4_ROW = hybrid_record(512, 64)
ODD = Record(values=200, tile=128, tail=6)  # a last tile that is not full


def e4m3(code: int) -> float:
    """Sign, four bits of exponent with bias 7, three of fraction; no infinities."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return float("nan")
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def bfloat16(low: int, high: int) -> float:
    value: float = struct.unpack("<f", bytes((0, 0, low, high)))[0]
    return value


def decode_latent(record: bytes) -> np.ndarray:
    """656 bytes: 512 values, 4 scales, 64 bfloat16."""
    assert len(record) == 656
    scales = struct.unpack("<4f", record[512:528])
    values = [e4m3(code) * scales[at // 128] for at, code in enumerate(record[:512])]
    tail = [bfloat16(*record[at : at + 2]) for at in range(528, 656, 2)]
    return np.array(values + tail)


def decode_key(page: bytes, row: int) -> np.ndarray:
    """A page of 132 bytes a row: the 128 values of every row, then the scale of every row."""
    num_rows = len(page) // 132
    values = page[row * 128 : (row + 1) * 128]
    scale = struct.unpack_from("<f", page, num_rows * 128 + row * 4)[0]
    return np.array([e4m3(code) * scale for code in values])


def decode_v4_row(page: bytes, row: int) -> np.ndarray:
    """A page of 584 bytes a row: of every row 448 values and 64 bfloat16, then of every row seven
    exponents and a zero."""
    num_rows = len(page) // 584
    data = page[row * 576 : (row + 1) * 576]
    exponents = page[num_rows * 576 + row * 8 : num_rows * 576 + (row + 1) * 8]
    assert exponents[7] == 0
    values = [e4m3(code) * 2.0 ** (exponents[at // 64] - 127) for at, code in enumerate(data[:448])]
    return np.array(values + [bfloat16(*data[at : at + 2]) for at in range(448, 576, 2)])


def make_rows(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal rows, large and tiny ones, one of zeros, one with a value far above the others."""
    rows = torch.randn(9, width, generator=torch.Generator().manual_seed(4))
    rows[1] *= 1e4
    rows[2] *= 1e-6
    rows[3] = 0
    rows[4, width // 3] = 3e4
    rows[5, :3] = torch.tensor([448.0, -448.0, 0.875])
    return rows.to(dtype)


def written(backend: str, rows: torch.Tensor, record: Record) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of other bytes with the rows in it, and their slots."""
    shape = (5, PAGE_TOKENS, record.num_bytes)
    cache = torch.full(shape, 0x3A, dtype=torch.uint8)
    slots = torch.tensor([19, 3, 7, 0, 12, 11, 5, 8, 16])
    kernels.load(backend).sparse.write_record(cache, slots, rows, record)
    return cache, slots


def assert_nearest(row: np.ndarray, decoded: np.ndarray, tile: int) -> None:
    """Every value is the nearest that e4m3 has at its tile's least fitting power of two."""
    codes = np.array([e4m3(code) for code in range(256) if code & 127 != 127])
    for first in range(0, len(row), tile):
        part, got = row[first : first + tile], decoded[first : first + tile]
        most = max(float(np.abs(part).max()), 1e-4)
        scale = 2.0 ** np.ceil(np.log2(most / 448))
        assert np.abs(part).max() <= 448 * scale
        best = np.abs(part[:, None] / scale - codes).min(axis=1)
        assert np.isin(got / scale, codes).all()
        np.testing.assert_allclose(np.abs(got / scale - part / scale), best, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_records_have_their_656_bytes(backend: str, dtype: torch.dtype) -> None:
    assert LATENT.num_bytes == 656
    rows = make_rows(576, dtype)
    cache, slots = written(backend, rows, LATENT)
    flat = cache.view(-1, 656)
    read = kernels.load(backend).sparse.read_record(cache, slots, LATENT, torch.float32)
    for row, slot, back in zip(rows, slots.tolist(), read, strict=True):
        decoded = decode_latent(flat[slot].numpy().tobytes())
        np.testing.assert_array_equal(back.double().numpy(), decoded)
        assert_nearest(row[:512].double().numpy(), decoded[:512], 128)
        np.testing.assert_array_equal(decoded[512:], row[512:].bfloat16().double().numpy())
    untouched = [slot for slot in range(20) if slot not in slots.tolist()]
    assert (flat[untouched] == 0x3A).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_index_keys_have_their_132_bytes(backend: str) -> None:
    assert KEY.num_bytes == 132
    rows = make_rows(128)
    cache, slots = written(backend, rows, KEY)
    read = kernels.load(backend).sparse.read_record(cache, slots, KEY, torch.float32)
    for row, slot, back in zip(rows, slots.tolist(), read, strict=True):
        page = cache[slot // PAGE_TOKENS].numpy().tobytes()
        decoded = decode_key(page, slot % PAGE_TOKENS)
        np.testing.assert_array_equal(back.double().numpy(), decoded)
        assert_nearest(row.double().numpy(), decoded, 128)
    assert int((cache == 0x3A).sum()) >= 11 * 132


@pytest.mark.parametrize("backend", BACKENDS)
def test_v4_rows_have_their_584_bytes(backend: str) -> None:
    assert V4_ROW.num_bytes == 584
    rows = make_rows(512)
    cache, slots = written(backend, rows, V4_ROW)
    read = kernels.load(backend).sparse.read_record(cache, slots, V4_ROW, torch.float32)
    for row, slot, back in zip(rows, slots.tolist(), read, strict=True):
        page = cache[slot // PAGE_TOKENS].numpy().tobytes()
        decoded = decode_v4_row(page, slot % PAGE_TOKENS)
        np.testing.assert_array_equal(back.double().numpy(), decoded)
        assert_nearest(row[:448].double().numpy(), decoded[:448], 64)
        np.testing.assert_array_equal(decoded[448:], row[448:].bfloat16().double().numpy())


@pytest.mark.parametrize("record", [LATENT, KEY, V4_ROW, ODD, latent_record(32, 8)], ids=repr)
def test_back_ends_write_the_same_bytes(record: Record) -> None:
    rows = make_rows(record.width)
    caches = [written(backend, rows, record)[0] for backend in BACKENDS]
    assert torch.equal(*caches)
    slots = torch.tensor([19, 3, 7, 0])
    for dtype in (torch.float32, torch.bfloat16):
        read = [
            kernels.load(backend).sparse.read_record(caches[0], slots, record, dtype)
            for backend in BACKENDS
        ]
        assert read[0].dtype == dtype and torch.equal(*read)


@pytest.mark.parametrize("record", [LATENT, KEY, V4_ROW, ODD], ids=repr)
def test_a_row_read_back_is_written_to_the_same_bytes(record: Record) -> None:
    ops = kernels.load("cpu").sparse
    cache, slots = written("cpu", make_rows(record.width), record)
    again = cache.clone()
    # a tile may fit a smaller power of two after rounding down: its values stay what they are
    ops.write_record(again, slots, ops.read_record(cache, slots, record, torch.float32), record)
    before = ops.read_record(cache, slots, record, torch.float32)
    assert torch.equal(ops.read_record(again, slots, record, torch.float32), before)
