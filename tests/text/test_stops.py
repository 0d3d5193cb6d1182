"""Stop strings: the leftmost match of the whole text, however the text is cut into tokens."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.text.stops import StopStrings


def pieces_of(data: bytes, cuts: tuple[int, ...]) -> list[bytes]:
    edges = (0, *cuts, len(data))
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def stopped(pieces: list[bytes], stops: list[str]) -> tuple[bytes, int] | None:
    """The text left and the tokens kept when the pieces come one by one; None without a stop."""
    watch = StopStrings.of(stops, pieces.__getitem__).watch()
    cut = None
    for place in range(len(pieces)):
        cut = watch.push(place)
        if cut is not None:
            break
    cut = cut or watch.finish()
    if cut is None:
        return None
    kept = b"".join(pieces[: cut.num_tokens])
    if cut.trimmed_bytes:
        assert 0 < cut.trimmed_bytes < len(pieces[cut.num_tokens - 1]), "a token without any text"
        kept = kept[: -cut.trimmed_bytes]
    return kept, cut.num_tokens


def leftmost(data: bytes, stops: list[str]) -> bytes | None:
    """The specification: what stands before the first place where any stop string begins."""
    places = [data.find(stop.encode()) for stop in stops]
    found = [place for place in places if place >= 0]
    return data[: min(found)] if found else None


def all_cuts(size: int) -> Iterator[tuple[int, ...]]:
    for number in range(size):
        yield from itertools.combinations(range(1, size), number)


FIELD_CASES = [
    ("The answer is 4.\n###END### rest", ["###END###"], "The answer is 4.\n"),
    ("Answer\n\n", ["\n"], "Answer"),
    ("do you want any help", [" any"], "do you want"),
    ("aaa bbb ccc", ["ccc", "bbb"], "aaa "),
    ("ok 🦙 no", ["🦙"], "ok "),
    ("xabcd", ["bc", "abcd"], "x"),
    ("xabcy", ["bc", "abcd"], "xa"),
    ("ab", ["ab", "abc"], ""),
    ("aab", ["ab"], "a"),
]


@pytest.mark.parametrize(("text", "stops", "want"), FIELD_CASES)
def test_fc_053_every_split_into_few_tokens(text: str, stops: list[str], want: str) -> None:
    data = text.encode()
    for number in (0, 1, 2):
        for cuts in itertools.combinations(range(1, len(data)), number):
            found = stopped(pieces_of(data, cuts), stops)
            assert found is not None and found[0] == want.encode(), cuts


@pytest.mark.parametrize(("text", "stops", "want"), [c for c in FIELD_CASES if len(c[0]) < 9])
def test_fc_053_every_split_of_a_short_text(text: str, stops: list[str], want: str) -> None:
    data = text.encode()
    for cuts in all_cuts(len(data)):
        found = stopped(pieces_of(data, cuts), stops)
        assert found is not None and found[0] == want.encode(), cuts


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab é", max_size=14),
    stops=st.lists(st.text("ab é", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_cut_is_where_the_leftmost_stop_string_of_the_text_begins(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    encoded = text.encode()
    inner = st.integers(1, max(1, len(encoded) - 1))
    cuts = tuple(sorted(data.draw(st.sets(inner, max_size=len(encoded))))) if encoded else ()
    cuts = tuple(cut for cut in cuts if cut < len(encoded))
    pieces = pieces_of(encoded, cuts)
    found, want = stopped(pieces, stops), leftmost(encoded, stops)
    if want is None:
        assert found is None
        return
    assert found is not None and found[0] == want
    kept = list(itertools.accumulate(map(len, pieces), initial=0))
    assert found[1] == next(n for n, edge in enumerate(kept) if edge >= len(want))


def test_generation_ends_with_the_token_that_settles_the_match() -> None:
    watch = StopStrings.of(["bc", "abcd"], [b"xa", b"b", b"c", b"d"].__getitem__).watch()
    assert [watch.push(place) is None for place in range(3)] == [True, True, True]
    cut = watch.push(3)
    assert cut is not None and (cut.num_tokens, cut.trimmed_bytes) == (1, 1)
    plain = StopStrings.of(["bc"], [b"xa", b"b", b"c"].__getitem__).watch()
    assert plain.push(0) is None and plain.push(1) is None
    assert plain.push(2) is not None, "nothing can begin further left"


def test_fc_053_an_empty_stop_string_is_no_rule() -> None:
    with pytest.raises(AssertionError, match="empty stop string"):
        StopStrings.of([""], bytes)
