"""Arrays as lists: what `to_pylist` makes, in value and in type."""

import datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmla.jobs.array_values import array_values

KINDS = [
    *(pa.int8(), pa.uint8(), pa.int32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()),
    *(pa.bool_(), pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.null()),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("has_nulls", [False, True])
def test_every_kind_of_value_is_that_of_to_pylist(kind: pa.DataType, has_nulls: bool) -> None:
    if pa.types.is_null(kind):
        array = pa.nulls(3)
    elif pa.types.is_binary(kind):
        array = pa.array([b"", b"\xff", b"x"], kind)
    elif pa.types.is_boolean(kind):
        array = pa.array([True, False, True])
    else:
        array = pa.array(["7", "0", "100"]).cast(kind)
    if has_nulls:
        array = pa.concat_arrays([array, pa.nulls(2, kind), array])
    for part in (array, array.slice(1), array.slice(2, 1), array.slice(0, 0)):
        found, wanted = array_values(part), part.to_pylist()
        assert found == wanted and list(map(type, found)) == list(map(type, wanted))


@given(st.lists(st.one_of(st.none(), st.text(max_size=6)), max_size=20))
def test_texts_stay_as_they_are(texts: list[str | None]) -> None:
    clean = [None if text is None else text.encode("utf-8", "replace").decode() for text in texts]
    for kind in (pa.string(), pa.large_string()):
        assert array_values(pa.array(clean, kind)) == clean


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_text_that_is_not_utf8_is_refused(kind: pa.DataType) -> None:
    broken = pa.array([b"ok", b"\xff\xfe"], pa.binary()).cast(pa.large_binary())
    array = pa.Array.from_buffers(pa.large_string(), 2, broken.buffers())
    if kind == pa.string():
        array = pa.Array.from_buffers(kind, 2, pa.array([b"ok", b"\xff\xfe"]).buffers())
    with pytest.raises((ValueError, pa.ArrowException)):
        array_values(array)


def test_other_types_are_python_s_own() -> None:
    day = datetime.date(2024, 2, 29)
    assert array_values(pa.array([day, None])) == [day, None]
    assert array_values(pa.array([{"a": [1]}, None])) == [{"a": [1]}, None]
    assert array_values(pa.array(["x", None, "x"]).dictionary_encode()) == ["x", None, "x"]
