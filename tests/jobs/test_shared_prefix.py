"""What `plan` says of shared beginnings is what the prefix cache then serves."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from batchmla.jobs.plan import plan_job
from batchmla.jobs.plan_view import print_plan
from batchmla.jobs.run import run_job
from batchmla.jobs.shared_prefix import SharedPrefix
from batchmla.jobs.spec import LoadedSpec, build_spec
from batchmla.text.tokenizer import Tokenizer
from batchmla.weights.folder import find_model

BLOCK = 16
WORDS = "Sold to A. Jensen, Quay 14: 3 x lamp at 5.20, 2 x jug at 11.75, 10 off; paid by card."
ENDS = ("red", "blue", "7 x", "(9)", "zinc")


def job(folder: Path, prefix: str, **engine: Any) -> LoadedSpec:
    table = pa.table({"text": [f"{prefix}{end}" for end in ENDS]})
    pq.write_table(table, folder / "in.parquet")
    return build_spec(
        {
            "model": {"path": "builtin:tally", "device": "cpu"},
            "input": {"path": str(folder / "in.parquet")},
            "prompt": {"raw": "text"},
            "sampling": {"temperature": 0, "max_tokens": 2},
            "engine": {"block_size": BLOCK} | engine,
            "output": {"path": str(folder / "out")},
        }
    )


def prefix_of(num_tokens: int) -> str:
    """Text whose tokens, before any of the ends, are so many that all rows share."""
    tokenizer = Tokenizer.load(find_model("builtin:tally"))
    for cut in range(1, len(WORDS)):
        rows = [tokenizer.encode(WORDS[:cut] + end).tolist() for end in ENDS]
        shared = next(
            place for place, ids in enumerate(zip(*rows, strict=False)) if len(set(ids)) > 1
        )
        if shared == num_tokens:
            return WORDS[:cut]
    raise AssertionError(f"no text of {num_tokens} tokens")


@pytest.mark.parametrize("num_tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_fc_108_the_plan_tells_what_a_prefix_will_save(tmp_path: Path, num_tokens: int) -> None:
    loaded = job(tmp_path, prefix_of(num_tokens))
    plan = plan_job(loaded)
    assert plan.shared_prefix_tokens == num_tokens
    assert plan.reusable_tokens == num_tokens // BLOCK * BLOCK * (len(ENDS) - 1)
    assert run_job(loaded, progress="off").cached_tokens == plan.reusable_tokens
    console = Console(record=True, width=200)
    print_plan(plan, console)
    said = console.export_text()
    assert f"share their first {num_tokens}, of which whole pages of {BLOCK} are served" in said


def test_without_a_prefix_cache_nothing_is_promised(tmp_path: Path) -> None:
    loaded = job(tmp_path, prefix_of(2 * BLOCK), prefix_caching=False)
    assert plan_job(loaded).reusable_tokens == 0
    assert run_job(loaded, progress="off").cached_tokens == 0


@given(
    rows=st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=9), st.integers(0, 3)), max_size=8)
)
def test_reuse_is_counted_as_a_cache_of_any_size_would(
    rows: list[tuple[list[int], int]],
) -> None:
    prefix, seen, expected = SharedPrefix(2), set[tuple[int, ...]](), 0
    for ids, count in rows:
        prefix.add(np.array(ids, np.int32), count)
        for _ in range(count):
            pages = [tuple(ids[: end + 2]) for end in range(0, len(ids) - 2, 2)]
            pages = [page for page in pages if len(page) < len(ids)]
            hits = list(itertools.takewhile(seen.__contains__, pages))
            expected += 2 * len(hits)
            seen.update(pages)
    assert prefix.reusable_tokens == expected
    used = [ids for ids, count in rows if count]
    shared = list(itertools.takewhile(lambda some: len(set(some)) == 1, zip(*used, strict=False)))
    assert prefix.common_tokens == len(shared)
