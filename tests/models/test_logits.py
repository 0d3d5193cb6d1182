"""Logits equal transformers' whatever the chunks, the batch and the pages."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_logits
from ranks import logits_on_ranks
from steps import Row, run_chunks, run_step
from tiny import CORE, EDGES, TINY, WITH_LANES, oracle_logits, read_config, write_tiny

from batchmla import kernels
from batchmla.attention.mla import MlaForms
from batchmla.kv.cache import LayerCache, make_cache
from batchmla.models import get_family
from batchmla.models.load import load_model
from batchmla.parallel import Par
from batchmla.placement import Placement

PAGE_TOKENS = 16
NUM_PAGES = 96
NUM_LANES = 8
LENGTHS = (1, 2, 63, 64, 65, 200)
SHORT_LENGTHS = (1, 2, 15, 16, 17, 96)  # of the families that share a flavour with the core
CPU = torch.device("cpu")
# (family, back end, form): the form only where there is one
CASES = [
    pytest.param(name, backend, forms, id=f"{name}-{backend}-{forms}")
    for name in TINY
    for backend in ("cpu", "reference")
    for forms in (MlaForms if name.startswith("v3") else (None,))
    if backend == "cpu" or forms is not MlaForms.CHEAPEST
]


@dataclass
class Tiny:
    """A saved checkpoint, its prompts, and what transformers says about them."""

    folder: Path
    raw: dict[str, Any]
    prompts: list[list[int]]
    expected: list[torch.Tensor]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    made = {}
    for name in TINY:
        folder = tmp_path_factory.mktemp(name)
        oracle = write_tiny(folder, name)
        source = random.Random(name)
        lengths = LENGTHS if name in CORE else EDGES.get(name, SHORT_LENGTHS)
        prompts = [[source.randrange(256) for _ in range(length)] for length in lengths]
        expected = [oracle_logits(oracle, ids) for ids in prompts]
        made[name] = Tiny(folder, read_config(folder), prompts, expected)
    return made


def load_tiny(tiny: Tiny, backend: str, forms: MlaForms | None, dtype: torch.dtype) -> Any:
    ops = kernels.load(backend)
    model = load_model(tiny.folder, tiny.raw, Placement(), Par.single(), ops, dtype, CPU)
    if forms is not None:
        model.mla_forms = forms
    return model


def make_tiny_cache(tiny: Tiny, dtype: str = "float32") -> tuple[LayerCache, ...]:
    family = get_family(tiny.raw)
    layout = family.layout(family.Config.from_hf(tiny.raw), dtype, Placement(), PAGE_TOKENS)
    cache = make_cache(layout, NUM_PAGES, CPU, num_lanes=NUM_LANES)
    for layer in cache:
        for part in layer.values():
            part.normal_()  # an unwritten row must not be read
    return cache


def make_rows(prompts: Sequence[list[int]], seed: int = 0) -> list[Row]:
    """Each prompt on pages drawn from a shuffled pool."""
    pool = list(range(NUM_PAGES))
    random.Random(seed).shuffle(pool)
    rows = []
    for lane, ids in zip(random.Random(seed).sample(range(NUM_LANES), len(prompts)), prompts,
                         strict=True):  # fmt: skip
        pages = [pool.pop() for _ in range(-(-len(ids) // PAGE_TOKENS))]
        rows.append(Row(ids, pages, lane=lane))
    return rows


def assert_rows(name: str, rows: Sequence[Row], expected: Sequence[torch.Tensor]) -> None:
    for row, want in zip(rows, expected, strict=True):
        assert_logits(f"{name}, {len(row.ids)} tokens", torch.cat(row.logits), want)


@pytest.mark.parametrize(("name", "backend", "forms"), CASES)
def test_mixed_batches_of_unequal_chunks_on_shuffled_pages(
    tiny: dict[str, Tiny], name: str, backend: str, forms: MlaForms | None
) -> None:
    case = tiny[name]
    model, cache = load_tiny(case, backend, forms, torch.float32), make_tiny_cache(case)
    rows = make_rows(case.prompts)
    run_chunks(model, cache, rows, [1, 2, 7, 1, 64, 29], PAGE_TOKENS)
    assert_rows("mixed", rows, case.expected)


@pytest.mark.parametrize(
    ("name", "forms", "chunk"),
    [
        (name, forms, chunk)
        for name, backend, forms in (case.values for case in CASES)
        for chunk in (1, 7, 64, 200)
        # single tokens in a pinned form are part of the mixed batches
        if backend == "cpu" and (chunk > 1 or forms in (None, MlaForms.CHEAPEST))
    ],
)
def test_chunks_of_one_size(
    tiny: dict[str, Tiny], name: str, forms: MlaForms | None, chunk: int
) -> None:
    case = tiny[name]
    model, cache = load_tiny(case, "cpu", forms, torch.float32), make_tiny_cache(case)
    rows = make_rows(case.prompts, seed=chunk)
    run_chunks(model, cache, rows, chunk, PAGE_TOKENS)
    assert_rows(f"chunks of {chunk}", rows, case.expected)


@pytest.mark.parametrize("name", TINY)
def test_whole_prompt_alone_on_consecutive_pages(tiny: dict[str, Tiny], name: str) -> None:
    case = tiny[name]
    model, cache = load_tiny(case, "cpu", None, torch.float32), make_tiny_cache(case)
    for ids, expected in zip(case.prompts, case.expected, strict=True):
        row = Row(ids, list(range(5, 5 + -(-len(ids) // PAGE_TOKENS))))
        run_chunks(model, cache, [row], len(ids), PAGE_TOKENS)
        assert_rows("whole", [row], [expected])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", [name for name in TINY if name not in WITH_LANES])
def test_prefix_hit_reads_another_sequences_pages(
    tiny: dict[str, Tiny], name: str, backend: str
) -> None:
    case = tiny[name]
    model, cache = load_tiny(case, backend, None, torch.float32), make_tiny_cache(case)
    ids, expected = case.prompts[-1], case.expected[-1]
    first = Row(ids[:70], [9, 3, 41, 8, 20])
    run_chunks(model, cache, [first], 64, PAGE_TOKENS)
    hits = [
        Row(ids[: 64 + extra], [9, 3, 41, 8, 50 + index, 60 + index], computed=64)
        for index, extra in enumerate((1, 2, 31))
    ]
    while any(row.computed < len(row.ids) for row in hits):
        todo = [(row, min(9, len(row.ids) - row.computed)) for row in hits]
        run_step(model, cache, [(row, count) for row, count in todo if count], PAGE_TOKENS)
    assert_rows("prefix hit", hits, [expected[64 : len(row.ids)] for row in hits])


def test_two_ranks_give_the_logits_of_one(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    source = random.Random(5)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (1, 17, 40)]
    folders = [case.folder for case in tiny.values()]
    by_rank = logits_on_ranks(folders, prompts, tmp_path, num_ranks=2)
    for index, case in enumerate(tiny.values()):
        model, cache = load_tiny(case, "cpu", None, torch.float32), make_tiny_cache(case)
        rows = make_rows(prompts)
        run_chunks(model, cache, rows, 13, PAGE_TOKENS)
        for results in by_rank:
            assert_rows(f"two ranks, {case.folder.name}", rows, results[index])


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "cpu") for name in TINY] + [(name, "reference") for name in CORE],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_stays_near(
    tiny: dict[str, Tiny], name: str, dtype: torch.dtype, backend: str
) -> None:
    case = tiny[name]
    model = load_tiny(case, backend, None, dtype)
    cache = make_tiny_cache(case, str(dtype).removeprefix("torch."))
    rows = make_rows(case.prompts[:5])
    run_chunks(model, cache, rows, [1, 2, 7, 64, 30], PAGE_TOKENS)
    for row, expected in zip(rows, case.expected, strict=False):
        actual = torch.cat(row.logits)
        assert actual.dtype == torch.float32
        # a router's near-tie may fall the other way for single tokens: the median is what is held
        error_T = (actual - expected).norm(dim=1) / expected.norm(dim=1)
        assert error_T.median() < (0.06 if dtype == torch.bfloat16 else 0.008), error_T
