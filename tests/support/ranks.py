"""Runs tiny models on several gloo ranks: spawned processes that meet in a file."""

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import torch
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
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=_run_rank,
            args=(
                Placement(tensor=num_ranks, expert=expert, rank=rank),
                list(folders),
                list(prompts),
                scratch,
                kv_dtype,
                keeps_quantised,
            ),
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * num_ranks
    return [torch.load(scratch / f"rank{rank}.pt") for rank in range(num_ranks)]


def _run_rank(
    placement: Placement,
    folders: list[Path],
    prompts: list[list[int]],
    scratch: Path,
    kv_dtype: str,
    keeps_quantised: bool,
) -> None:
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
    torch.save(results, scratch / f"rank{placement.rank}.pt")
    par.close()
