"""Ids that are distinct are told so; whatever is doubtful is left to a closer look."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmla.jobs.unique import DistinctIds


def are_distinct(*arrays: pa.Array) -> bool:
    found = DistinctIds()
    for array in arrays:
        found.add(array)
    return found.are_distinct()


@given(
    st.lists(st.text(max_size=30), max_size=40), st.sampled_from([pa.string(), pa.large_string()])
)
def test_texts_are_distinct_if_and_only_if_no_two_are_equal(
    ids: list[str], kind: pa.DataType
) -> None:
    ids = [text.encode(errors="replace").decode() for text in ids]
    half = len(ids) // 2
    arrays = pa.array(ids[:half], kind), pa.array(ids[half:], kind)
    assert are_distinct(*arrays) == (len(set(ids)) == len(ids))


def test_many_neighbouring_texts_and_numbers_are_distinct() -> None:
    texts = [f"doc-{number:09d}" for number in range(200_000)]
    assert are_distinct(pa.array(texts[:150_000]), pa.array(texts[150_000:]))
    assert not are_distinct(pa.array(texts), pa.array(texts[77_777:77_778]))
    numbers = pa.array(np.arange(-100_000, 100_000))
    assert are_distinct(numbers) and not are_distinct(numbers, pa.array([-100_000]))


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int64(), pa.uint64()], ids=str)
def test_numbers_of_every_width(kind: pa.DataType) -> None:
    assert are_distinct(pa.array([0, 1, 127], kind), pa.array([5], kind))
    assert not are_distinct(pa.array([0, 1, 127], kind), pa.array([127], kind))


def test_the_largest_numbers_are_told_apart() -> None:
    assert are_distinct(pa.array([2**64 - 1, 2**63, 2**63 - 1], pa.uint64()))


def test_texts_that_differ_only_at_a_seam_or_by_zeros_are_distinct() -> None:
    words = ["", "\0", "\0\0", "a" * 7, "a" * 8, "a" * 9, "a" * 8 + "\0", "a" * 16, "a" * 15 + "b"]
    assert are_distinct(pa.array(words))


def test_slices_count_only_their_own_rows() -> None:
    ids = pa.array(["x", "a", "b", "x"])
    assert are_distinct(ids.slice(1, 3)) and are_distinct(ids.slice(0, 3))
    assert not are_distinct(ids)
    assert not are_distinct(ids.slice(0, 2), ids.slice(3, 1))


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(["a", None]),
        pa.array([1, None]),
        pa.array(["a" * 5000, "b"]),
        pa.array([b"a", b"b"]),
        pa.Array.from_buffers(
            pa.string(),
            2,
            [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"\xffa")],
        ),
    ],
    ids=["null text", "null number", "long", "bytes", "no UTF-8"],
)
def test_what_is_doubtful_is_not_called_distinct(ids: pa.Array) -> None:
    assert not are_distinct(ids)
    assert not are_distinct(ids, pa.array(["c"]))


def test_no_ids_are_distinct() -> None:
    assert are_distinct() and are_distinct(pa.array([], pa.string()))
