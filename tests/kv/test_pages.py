"""The page table: consecutive pages, sharing by content, least recently used reuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.kv.pages import PageTable, chain_hashes, page_hash


def hashes_of(token_ids: list[int], page_tokens: int) -> list[bytes]:
    known: list[bytes] = []
    chain_hashes(known, np.array(token_ids, np.int32), page_tokens, len(token_ids))
    return known


def test_hash_names_the_whole_prefix() -> None:
    first, second = hashes_of([1, 2, 3, 1, 2, 3, 9], 3)
    assert first == page_hash(b"", np.array([1, 2, 3], np.int32))
    assert second == page_hash(first, np.array([1, 2, 3], np.int32)) != first
    assert hashes_of([1, 2, 4, 1, 2, 3], 3)[1] != second
    assert len(first) == 16


def test_a_sequence_gets_and_grows_consecutive_pages() -> None:
    table = PageTable(64, 4)
    first = table.allocate(3, room_pages=10)
    second = table.allocate(2, room_pages=10)
    assert np.diff(first).tolist() == [1, 1] and np.diff(second).tolist() == [1]
    for pages in (first, second):
        for _ in range(7):
            pages += table.allocate(1, after=pages[-1])
        assert np.diff(pages).tolist() == [1] * (len(pages) - 1)
    assert table.used_pages == 19


def test_fragmented_pool_is_used_up_from_the_longest_runs() -> None:
    table = PageTable(12, 4)
    pages = table.allocate(12)
    table.release([pages[i] for i in (1, 2, 3, 6, 9, 10)], keep=0)
    got = table.allocate(5)
    assert got[:3] == [1, 2, 3] and set(got[3:]) <= {6, 9, 10} and len(set(got)) == 5
    assert table.available_pages == 1


def test_published_pages_are_found_shared_and_evicted_least_recently_used_first() -> None:
    table = PageTable(4, 2)
    name_a, name_b = hashes_of([1, 2, 3, 4], 2)
    (name_c,) = hashes_of([5, 6], 2)
    a, b = table.allocate(2)
    (c,) = table.allocate(1)
    for page, name in ((a, name_a), (b, name_b), (c, name_c)):
        table.publish(page, name)
    assert table.match([name_a, name_b]) == [a, b] and table.match([name_b]) == [b]
    table.acquire([a, b])
    assert table.refs[a] == 2
    assert table.release([a, b], keep=2) == [] and table.release([a, b], keep=2) == []
    table.release([c], keep=1)
    assert table.available_pages == 4 and table.idle_among([a, b, c]) == 3
    table.allocate(2)  # one blank page, then the tail of the oldest prefix
    assert table.match([name_a, name_b]) == [a] and table.match([name_c]) == [c]
    table.allocate(1)
    assert table.match([name_a]) == [] and table.match([name_c]) == [c]


def test_same_content_twice_keeps_the_first_page() -> None:
    table = PageTable(2, 2)
    one, two = table.allocate(2)
    (name,) = hashes_of([1, 2], 2)
    table.publish(one, name)
    table.publish(two, name)
    assert table.match([name]) == [one] and not table.is_published(two)
    assert table.release([two], keep=1) == [two]


def test_withdrawn_pages_are_not_found_again() -> None:
    table = PageTable(2, 2)
    (page,) = table.allocate(1)
    (name,) = hashes_of([1, 2], 2)
    table.publish(page, name)
    table.withdraw([page])
    assert table.match([name]) == [] and table.release([page], keep=1) == [page]


def test_more_than_available_is_refused() -> None:
    table = PageTable(2, 2)
    with pytest.raises(AssertionError, match="3 of 2 pages"):
        table.allocate(3)
    (page,) = table.allocate(1)
    table.release([page], keep=0)
    with pytest.raises(AssertionError, match="without a reference"):
        table.release([page], keep=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_pages=st.integers(1, 24))
def test_any_history_keeps_every_page_in_one_state(data: st.DataObject, num_pages: int) -> None:
    table = PageTable(num_pages, 1)
    held: list[list[int]] = []
    next_name = 0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "release", "publish", "share", "grow"]))
        if action == "allocate" and table.available_pages:
            count = data.draw(st.integers(1, table.available_pages))
            held.append(table.allocate(count, room_pages=data.draw(st.integers(0, 8))))
        elif action == "grow" and held and table.available_pages:
            held[-1] += table.allocate(1, after=held[-1][-1])
        elif action == "release" and held:
            pages = held.pop(data.draw(st.integers(0, len(held) - 1)))
            table.release(pages, keep=data.draw(st.integers(0, len(pages))))
        elif action == "publish" and held:
            next_name += 1
            table.publish(held[-1][0], next_name.to_bytes(16, "little"))
        elif action == "share":
            found = table.match([data.draw(st.integers(1, 9)).to_bytes(16, "little")])
            if found:
                table.acquire(found)
                held.append(found)
        counted = np.bincount([page for pages in held for page in pages], minlength=num_pages)
        assert table.refs == counted.tolist()
        assert table.used_pages == int((counted > 0).sum())
        everything = [*table._idle, *np.flatnonzero(table._is_blank_P), *np.flatnonzero(counted)]
        assert sorted(everything) == list(range(num_pages))


class Known:
    """A future from a table of hashes."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self.ranks = ranks

    def next_use(self, name: bytes) -> int | None:
        return self.ranks.get(name)


def idle_table(count: int) -> tuple[PageTable, list[bytes]]:
    """A full pool of idle pages, released in order, one content each."""
    table = PageTable(count, 1)
    names = [index.to_bytes(16, "little") for index in range(count)]
    pages = table.allocate(count)
    for page, name in zip(pages, names, strict=True):
        table.publish(page, name)
        table.release([page], keep=1)
    return table, names


def test_pages_wanted_again_outlast_others_and_the_latest_of_them_goes_first() -> None:
    table, names = idle_table(6)
    table.future = Known({names[0]: 7, names[2]: 3, names[3]: 9})
    gone = []
    for _ in range(6):
        table.allocate(1)
        gone.append(next(n for n in range(6) if not table.match([names[n]]) and n not in gone))
    assert gone == [1, 4, 5, 3, 0, 2]
    assert table.available_pages == 0


def test_several_pages_at_once_and_a_future_that_changes() -> None:
    table, names = idle_table(6)
    table.future = Known({names[n]: 10 - n for n in range(6)})
    table.allocate(2)
    assert [n for n in range(6) if not table.match([names[n]])] == [0, 1]
    table.future = Known({names[2]: 1, names[5]: 1})
    table.allocate(2)
    assert [n for n in range(6) if table.match([names[n]])] == [2, 5]
    table.future = None
    table.allocate(1)
    assert sum(bool(table.match([name])) for name in names) == 1
