"""The tally documents: held-out ones share nothing with training, and every answer is right."""

import itertools
import json
import re

import pytest

from examples.tally import wording
from examples.tally.documents import Document, Item, heldout_documents, training_documents
from examples.tally.wording import is_reserved, price_key, sum_key, word_key

NUM_TRAINING = 6000
NUM_HELDOUT = 1000


@pytest.fixture(scope="module")
def training() -> list[Document]:
    return list(itertools.islice(training_documents(seed=1_000_000), NUM_TRAINING))


@pytest.fixture(scope="module")
def heldout() -> list[Document]:
    return list(heldout_documents(seed=7, n=NUM_HELDOUT))


def sums(document: Document) -> list[tuple[int, int]]:
    """Give the running totals and what is added to each, the first item's aside."""
    pairs, total = [], 0
    for item in document.items:
        amount = item.quantity * item.price_cents
        pairs.append((total, amount))
        total += amount
    if document.discount_cents:
        pairs.append((total, -document.discount_cents))
    return pairs[1:]


def products(document: Document) -> list[tuple[int, int]]:
    """Give the quantities and unit prices."""
    return [(item.quantity, item.price_cents) for item in document.items]


def names(document: Document) -> set[str]:
    """Give the vendor's and the items' names."""
    return {document.vendor, *(item.name for item in document.items)}


def test_training_holds_nothing_reserved(training: list[Document]) -> None:
    for document in training:
        assert not any(is_reserved(word_key(word)) for word in document.words)
        assert not is_reserved(document.wording_key)
        assert not any(is_reserved(price_key(*pair)) for pair in products(document))
        assert not any(is_reserved(sum_key(*pair)) for pair in sums(document))


def test_heldout_holds_only_reserved(heldout: list[Document]) -> None:
    for document in heldout:
        assert all(is_reserved(word_key(word)) for word in document.words)
        assert is_reserved(document.wording_key)
        assert all(is_reserved(price_key(*pair)) for pair in products(document))
        assert all(is_reserved(sum_key(*pair)) for pair in sums(document))


def test_every_name_is_made_of_counted_words(heldout: list[Document]) -> None:
    fixed = {"market", "sons", "supplies", "the", "store", "ltd", "and", "bakery", "tools", "set"}
    for document in heldout:
        known = {word.lower() for word in document.words}
        for name in names(document):
            words = set(re.findall(r"[a-z]+", name.lower()))
            assert words <= known | fixed, name
            assert words & known, name


def test_samples_are_disjoint(training: list[Document], heldout: list[Document]) -> None:
    for part in (names, products, sums):
        seen = {value for document in training for value in part(document)}
        assert not seen & {value for document in heldout for value in part(document)}
    seen_wordings = {document.wording_key for document in training}
    assert not seen_wordings & {document.wording_key for document in heldout}
    assert not {document.text for document in training} & {document.text for document in heldout}


def test_answers_are_right(training: list[Document], heldout: list[Document]) -> None:
    for document in training[:1000] + heldout:
        cents = sum(item.quantity * item.price_cents for item in document.items)
        cents -= document.discount_cents
        answer = json.loads(document.answer)
        assert "\n" not in document.answer
        assert answer["items"] == len(document.items)
        assert round(float(answer["total"]) * 100) == cents
        assert round(float(answer["discount"]) * 100) == document.discount_cents
        assert 0 < cents <= 9_999


def test_every_step_of_the_reasoning_holds(heldout: list[Document]) -> None:
    for document in heldout:
        for quantity, digit, product, total, carry, value in re.findall(
            r"(\d)\*(\d)=(\d\d)\+(\d)\+(\d)=(\d\d)", document.reasoning
        ):
            assert int(quantity) * int(digit) == int(product)
            assert int(product) + int(total) + int(carry) == int(value)
        for digit, nines, total, carry, value in re.findall(
            r"9-(\d)=(\d\d)\+(\d)\+(\d)=(\d\d)", document.reasoning
        ):
            assert 9 - int(digit) == int(nines)
            assert int(nines) + int(total) + int(carry) == int(value)
        closing = re.search(r"^=(\d\d\.\d\d)\n\Z", document.reasoning, re.MULTILINE)
        assert closing is not None
        assert float(closing[1]) == float(json.loads(document.answer)["total"])


def test_documents_name_their_numbers(heldout: list[Document]) -> None:
    def shows(document: Document, item: Item) -> bool:
        price = f"{item.price_cents // 100}.{item.price_cents % 100:02d}"
        return price in document.text and str(item.quantity) in document.text

    assert all(shows(document, item) for document in heldout for item in document.items)


def test_wording_is_varied(heldout: list[Document]) -> None:
    counts = {len(document.items) for document in heldout}
    assert counts == {1, 2, 3, 4, 5, 6}
    assert len({document.wording_key for document in heldout}) > NUM_HELDOUT // 2
    share = sum(document.discount_cents > 0 for document in heldout) / NUM_HELDOUT
    assert 0.4 < share < 0.6
    assert set(wording.HEADERS) == {document.wording_key.split("'")[1] for document in heldout}


def test_same_seed_gives_same_documents(heldout: list[Document]) -> None:
    assert list(heldout_documents(seed=7, n=20)) == heldout[:20]
    assert list(heldout_documents(seed=8, n=20)) != heldout[:20]
