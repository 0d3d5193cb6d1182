"""Which recording a step takes, and what it is filled with, on a device that repeats calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from batchmla.engine.graphs import DecodeGraphs, context_bucket, row_bucket
from batchmla.engine.late import Late
from batchmla.engine.step import StepTables
from batchmla.kernels.groups import Spans
from batchmla.kv.cache import LayerCache
from batchmla.kv.step import Step

PAGE, PAGES = 16, 64


def test_row_buckets_grow_with_the_rows() -> None:
    found = [row_bucket(rows) for rows in range(1, 513)]
    assert found[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 16]
    assert all(bucket is not None and bucket >= rows for rows, bucket in enumerate(found, 1))
    assert found == sorted(found, key=lambda bucket: bucket or 0)
    assert len(set(found)) <= 32 and found[-1] == 512
    assert all((row_bucket(bucket or 0)) == bucket for bucket in found)
    assert row_bucket(513) is None


@pytest.mark.parametrize(
    ("context", "most", "expected"),
    [(1, 4096, 1024), (1024, 4096, 1024), (1025, 8192, 4096), (5000, 8192, 8192), (3, 96, 96)],
)
def test_context_buckets(context: int, most: int, expected: int) -> None:
    assert context_bucket(context, most) == expected


class Repeater:
    """A device whose recordings are calls; they are counted."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_recorded += 1
        filled = run()

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            filled.copy_(run())
            return filled

        return replay


class TableModel:
    """Each row's logits tell its token, position and the sum of its sequence's cached tokens; the
    keys come from tables that are kept, as a back end's do."""

    def plan(self, step: Step) -> dict[str, Any]:
        assert step.kept is not None
        return step.kept.get("tables", lambda: self._make(step))

    def _make(self, step: Step) -> dict[str, torch.Tensor]:
        rows, num_pages = step.pages_SP.shape
        tables = {
            "keys": torch.zeros(rows, dtype=torch.int64),
            "pages": torch.zeros(rows, num_pages, dtype=torch.int64),
        }

        def refill(spans: Spans) -> None:
            tables["keys"].copy_(torch.from_numpy(spans.num_keys_G))
            tables["pages"].copy_(torch.from_numpy(spans.pages_GP))

        assert step.kept is not None
        step.kept.follow(refill)
        return tables

    def forward(
        self, step: Step, plans: dict[str, torch.Tensor], cache: Sequence[LayerCache]
    ) -> torch.Tensor:
        flat = cache[0]["x"].flatten()
        flat[step.slots_T] = step.tokens_T.float()
        rows = cache[0]["x"][plans["pages"]].flatten(1)[:, : plans["pages"].shape[1] * PAGE]
        seen = torch.arange(rows.shape[1]) < plans["keys"][:, None]
        sums = torch.where(seen, rows, 0).sum(1)
        return torch.stack((step.tokens_T.float(), step.positions_T.float(), sums), 1)

    def logits(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        return hidden_NM.clone()


def decode(pages_SP: list[list[int]], positions: list[int], tokens: list[int]) -> StepTables:
    pages, places = np.array(pages_SP, np.int64), np.array(positions, np.int64)
    count = len(tokens)
    held = pages[np.arange(count), places // PAGE]
    return StepTables(
        tokens_T=np.array(tokens, np.int64),
        positions_T=places,
        slots_T=held * PAGE + places % PAGE,
        pages_SP=pages,
        logits_rows_N=np.arange(count),
        starts_S1=np.arange(count + 1),
        context_S=places + 1,
        prompt_S=np.ones(count, np.int64),
        lanes_S=np.zeros(count, np.int64),
    )


def graphs(device: Repeater, cache: torch.Tensor, max_model_len: int = 128) -> DecodeGraphs:
    return DecodeGraphs(
        TableModel(), ({"x": cache},),  # type: ignore[arg-type]
        page_tokens=PAGE, spare_page=len(cache) - 1, max_model_len=max_model_len,
        device=torch.device("cpu"), recorder=device,
    )  # fmt: skip


def test_steps_of_many_sizes_share_recordings() -> None:
    device, cache = Repeater(), torch.zeros(PAGES + 1, PAGE, 1)
    decoder, wanted = graphs(device, cache), torch.zeros(PAGES + 1, PAGE)
    random = np.random.default_rng(3)
    for _ in range(30):
        count = int(random.integers(1, 12))
        order = random.permutation(PAGES)[: 4 * count].reshape(count, 4)
        positions = random.integers(0, 4 * PAGE, count).tolist()
        tokens = random.integers(1, 50, count).tolist()
        tables = decode(order.tolist(), positions, tokens)
        wanted.flatten()[torch.from_numpy(tables.slots_T)] = torch.tensor(tokens).float()
        found = decoder.logits(tables, None)
        assert found is not None and found.shape == (count, 3)
        for row, (pages, position, token) in enumerate(zip(order, positions, tokens, strict=True)):
            rows = wanted[torch.from_numpy(pages)].flatten()[: position + 1]
            assert found[row].tolist() == [token, position, rows.sum()]
        assert torch.equal(cache[:PAGES, :, 0], wanted[:PAGES]), "a row wrote where it has no place"
    assert device.num_replayed == 30
    assert device.num_recorded == len(decoder.sizes) <= 9
    assert {context for _, context in decoder.sizes} == {128}


def test_tokens_that_only_the_device_knows() -> None:
    device, cache = Repeater(), torch.zeros(PAGES + 1, PAGE, 1)
    tables = decode([[1], [2], [3]], [0, 0, 0], [5, 0, 0])
    late = Late(rows_N=np.array([2, 1]), ids_N=torch.tensor([33, 22]))
    found = graphs(device, cache).logits(tables, late)
    assert found is not None and found[:, 0].tolist() == [5, 22, 33]


def test_long_contexts_have_recordings_of_their_own() -> None:
    device, cache = Repeater(), torch.zeros(400, PAGE, 1)
    decoder = graphs(device, cache, max_model_len=5000)
    for context in (3, 1024, 1025, 4097):
        pages = list(range(-(-context // PAGE)))
        assert decoder.logits(decode([pages], [context - 1], [1]), None) is not None
    assert decoder.sizes == [(1, 1024), (1, 4096), (1, 5000)]


def test_a_recording_is_for_what_the_pool_holds() -> None:
    """One long sequence beside short ones is replayed by tables for the mean; many that share more
    than the pool twice are not."""
    device, cache = Repeater(), torch.zeros(400, PAGE, 1)
    decoder, pages = graphs(device, cache, max_model_len=5000), list(range(300))
    few = decode([pages] * 8, [4799, *range(7)], [1] * 8)
    assert decoder.logits(few, None) is not None
    (recording,) = decoder._recordings.values()
    assert recording.step.host_context_S.tolist() == [2 * 399 * PAGE // 8 + 2048] * 8
    assert decoder.logits(decode([pages] * 8, [4799] * 8, [1] * 8), None) is None
    assert decoder.sizes == [(8, 5000)]


@pytest.mark.parametrize("kind", ["prompt", "unsampled", "too many"])
def test_other_steps_run_as_they_are(kind: str) -> None:
    device, cache = Repeater(), torch.zeros(PAGES + 1, PAGE, 1)
    count = 513 if kind == "too many" else 2
    tables = decode([[1]] * count, [0] * count, [1] * count)
    if kind == "prompt":
        tables = replace(tables, context_S=tables.context_S[:1])
    if kind == "unsampled":
        tables = replace(tables, logits_rows_N=tables.logits_rows_N[:1])
    assert graphs(device, cache).logits(tables, None) is None
    assert not device.num_recorded
