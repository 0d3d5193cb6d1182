"""Runs tiny models on several gloo ranks: spawned processes that meet in a file."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from gloo_ranks import bring, run_ranks
from steps import Row, run_chunks

from batchmla import kernels
from batchmla.kv.cache import make_cache
from batchmla.models import get_family
from batchmla.models.load import load_model
from batchmla.parallel import Par
from batchmla.placement import Placement

PAGE_TOKENS = 16


def logits_on_ranks(
    folders: Sequence[Path],
    prompts: Sequence[list[int]],
    scratch: Path,
    num_ranks: int,
    kv_dtype: str = "float32",
    *,
    expert: int = 1,
    keeps_quantised: bool = False,
) -> list[list[list[torch.Tensor]]]:
    """Per rank, per folder, per prompt: float32 [T, V]."""
    return run_ranks(
        _run_rank, num_ranks, scratch,
        Placement(tensor=num_ranks, expert=expert), list(folders), list(prompts), kv_dtype,
        keeps_quantised,
    )  # fmt: skip


def _run_rank(
    rank: int,
    scratch: Path,
    whole: Placement,
    folders: list[Path],
    prompts: list[list[int]],
    kv_dtype: str,
    keeps_quantised: bool,
) -> None:
    placement = replace(whole, rank=rank)
    torch.set_num_threads(1)
    par = Par.connect(placement, scratch / "store", timeout_s=230)
    results = []
    for folder in folders:
        raw = json.loads((folder / "config.json").read_text())
        family = get_family(raw)
        device = torch.device("cpu")
        model = load_model(
            folder, raw, placement, par, kernels.load("cpu"), torch.float32, device,
            keeps_quantised=keeps_quantised,
        )  # fmt: skip
        layout = family.layout(family.Config.from_hf(raw), kv_dtype, placement, PAGE_TOKENS)
        rows, first = [], 0
        for lane, ids in enumerate(prompts):
            num_pages = layout.pages_for(len(ids))
            rows.append(Row(ids, list(range(first, first + num_pages)), lane=lane))
            first += num_pages
        run_chunks(model, make_cache(layout, first, device, len(rows)), rows, 13, PAGE_TOKENS)
        results.append([torch.cat(row.logits) for row in rows])
    assert par.broadcast({"from": placement.rank}) == {"from": 0}
    bring(results, rank, scratch)
    par.close()
