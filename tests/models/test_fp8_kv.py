"""Models over a cache of e4m3 records: what a plain cache of the same rounded rows gives, whatever
the chunks, the batch, the back end and the number of ranks."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_logits
from ranks import logits_on_ranks
from steps import Row, run_chunks
from tiny import oracle_logits, read_config, write_tiny

from batchmla import kernels
from batchmla.attention.gqa import head_record
from batchmla.attention.mla import latent_record
from batchmla.kernels.ops import Ops
from batchmla.kernels.sparse_ops import Record
from batchmla.kv.cache import LayerCache, make_cache
from batchmla.models import get_family
from batchmla.models.load import load_model
from batchmla.parallel import Par
from batchmla.placement import Placement

NAMES = ("llama", "qwen3", "minimax_m2", "v2_lite", "v3", "v3_no_q_lora")
PAGE_TOKENS = 16
NUM_PAGES = 40
LENGTHS = (1, 17, 64, 96)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Folder and oracle."""
    made = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        made[name] = (folder, write_tiny(folder, name))
    return made


def make_rows(seed: int) -> list[Row]:
    source = random.Random(seed)
    pool = list(range(NUM_PAGES))
    source.shuffle(pool)
    return [
        Row(
            [source.randrange(256) for _ in range(length)],
            [pool.pop() for _ in range(-(-length // PAGE_TOKENS))],
        )
        for length in LENGTHS
    ]


def load(folder: Path, ops: Ops, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(folder, read_config(folder), Placement(), Par.single(), ops, dtype, CPU)


def cache_of(folder: Path, kv_dtype: str) -> tuple[LayerCache, ...]:
    raw = read_config(folder)
    family = get_family(raw)
    layout = family.layout(family.Config.from_hf(raw), kv_dtype, Placement(), PAGE_TOKENS)
    return make_cache(layout, NUM_PAGES, CPU)


def rounding(ops: Ops, kv_heads: int | None) -> Ops:
    """A back end whose plain cache takes only values that the records could hold."""

    def through(rows: torch.Tensor, record: Record) -> torch.Tensor:
        cache = torch.zeros(len(rows), 1, record.num_bytes, dtype=torch.uint8)
        slots = torch.arange(len(rows))
        ops.sparse.write_record(cache, slots, rows, record)
        return ops.sparse.read_record(cache, slots, record, rows.dtype)

    def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        assert kv_heads is not None
        ops.write(cache, slots, through(rows, head_record(kv_heads, rows.shape[1] // kv_heads)))

    def write_latent(cache: torch.Tensor, slots: torch.Tensor, *args: Any) -> None:
        ops.write_latent(cache, slots, *args)
        rows, rope = cache.flatten(0, 1)[slots], 2 * args[-1].shape[1]
        ops.write(cache, slots, through(rows, latent_record(rows.shape[1] - rope, rope)))

    return replace(ops, write=write, write_latent=write_latent)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_records_serve_as_the_cache(
    folders: dict[str, tuple[Path, Any]], name: str, backend: str
) -> None:
    folder, oracle = folders[name]
    ops, sizes = kernels.load(backend), (1, 7, 13, 64)
    records, plain = make_rows(3), make_rows(3)
    cache = cache_of(folder, "fp8")
    assert {part.dtype for layer in cache for part in layer.values()} == {torch.uint8}
    run_chunks(load(folder, ops), cache, records, sizes, PAGE_TOKENS)
    kv_heads = None if "latent" in cache[0] else read_config(folder)["num_key_value_heads"]
    rounded = load(folder, rounding(ops, kv_heads))
    run_chunks(rounded, cache_of(folder, "float32"), plain, sizes, PAGE_TOKENS)
    for row, want in zip(records, plain, strict=True):
        assert_logits("records", torch.cat(row.logits), torch.cat(want.logits))
        unrounded = oracle_logits(oracle, row.ids)
        assert (torch.cat(row.logits) - unrounded).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_neighbours_do_not_matter(
    folders: dict[str, tuple[Path, Any]], name: str
) -> None:
    """Sums of float32 differ by their order, and a code only where a value lies at its border."""
    folder, _ = folders[name]
    model = load(folder, kernels.load("cpu"))
    runs: list[Sequence[Row]] = []
    for sizes in ((96,) * 4, (1, 3, 64, 29)):
        rows = make_rows(8)
        run_chunks(model, cache_of(folder, "fp8"), rows, sizes, PAGE_TOKENS)
        runs.append(rows)
    for first, second in zip(*runs, strict=True):
        assert_logits(name, torch.cat(first.logits), torch.cat(second.logits))


def test_two_ranks_agree_with_one(folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """Ranks hold equal latents and add up in another order than one: a value at the border between
    two codes may fall the other way, which changes little of what e4m3 changes anyway."""
    names = ("llama", "minimax_m2", "v3")
    prompts = [row.ids for row in make_rows(5)]
    found = logits_on_ranks([folders[name][0] for name in names], prompts, tmp_path, 2, "fp8")
    for name, *results in zip(names, *found, strict=True):
        rows, (folder, oracle) = make_rows(5), folders[name]
        run_chunks(
            load(folder, kernels.load("cpu")), cache_of(folder, "fp8"), rows, 13, PAGE_TOKENS
        )
        for row, *ranks in zip(rows, *results, strict=True):
            assert torch.equal(*ranks), "the ranks differ from each other"
            one_TV, plain_TV = torch.cat(row.logits), oracle_logits(oracle, row.ids)
            differs_T = (ranks[0] - one_TV).norm(dim=1)
            cost_T = (one_TV - plain_TV).norm(dim=1)
            assert differs_T.max() < 0.05 * cost_T.mean()
