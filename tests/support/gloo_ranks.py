"""Ranks as processes of a test, each with something to bring back."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

JOIN_S = 240


def run_ranks(target: Callable[..., None], num_ranks: int, scratch: Path, *rest: Any) -> list[Any]:
    """Runs `target(rank, scratch, *rest)` on every rank; returns what each has left with
    `bring`."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=target, args=(rank, scratch, *rest)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(JOIN_S)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * num_ranks
    return [torch.load(_path(scratch, rank), weights_only=False) for rank in range(num_ranks)]


def bring(found: object, rank: int, scratch: Path) -> None:
    """Leaves what a rank found."""
    torch.save(found, _path(scratch, rank))


def _path(scratch: Path, rank: int) -> Path:
    return scratch / f"rank{rank}.pt"
