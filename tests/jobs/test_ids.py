"""The index of ids against a plain set, also where halves of hashes meet."""

import random

import pytest

from batchmla.jobs import ids as module
from batchmla.jobs.ids import IdIndex


def expected(batches: list[list[int]]) -> list[list[int]]:
    seen: set[int] = set()
    found = []
    for batch in batches:
        repeated = []
        for position, each in enumerate(batch):
            if each in seen:
                repeated.append(position)
            seen.add(each)
        found.append(repeated)
    return found


@pytest.mark.parametrize("max_run", [16, 1 << 20])
def test_ids_whose_hashes_share_a_half_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, max_run: int
) -> None:
    def half(typed_id: str | int) -> bytes:
        number = int(typed_id)
        return (number % 5).to_bytes(8, "little") + (number // 5).to_bytes(8, "little")

    monkeypatch.setattr(module, "id_hash", half)
    monkeypatch.setattr(module, "_MAX_RUN", max_run)
    dice = random.Random(0)
    batches = [[dice.randrange(300) for _ in range(dice.randrange(1, 30))] for _ in range(60)]
    index = IdIndex()
    assert [index.add(batch) for batch in batches] == expected(batches)


def test_numbers_and_texts_are_different_ids() -> None:
    index = IdIndex()
    assert index.add([7, "7", -7, ""]) == []
    assert index.add(["7", 8, 7]) == [0, 2]
