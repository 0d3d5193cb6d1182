"""Models whose rows choose what they read, choosing and attending by the kernels of GPUs: the
oracle's logits from plain caches, those of torch's calls from bytes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import Case
from compare import assert_logits
from steps import Row, run_chunks
from tiny import oracle_logits

from batchmla import kernels
from batchmla.kernels.ops import Ops

# tokens of each row, and of its chunks: rows that read everything beside rows that choose
LENGTHS, CHUNKS = (2, 17), (2, 14)


def mixed(chosen: list[torch.Tensor]) -> Ops:
    """Torch's calls for all that is not sparse; notes what rows choose."""
    ours, plain = kernels.load("triton"), kernels.load("torch")

    def noting(op: Callable[..., torch.Tensor]) -> Any:
        def call(*args: Any) -> torch.Tensor:
            chosen.append(op(*args))
            return chosen[-1]

        return call

    return replace(
        plain,
        sparse=replace(
            plain.sparse,
            select_keys=noting(ours.sparse.select_keys),
            sparse_mla=ours.sparse.sparse_mla,
        ),
        hybrid=replace(plain.hybrid, attend=ours.hybrid.attend),
        blocks=replace(plain.blocks, select=noting(ours.blocks.select), attend=ours.blocks.attend),
    )


def make_rows() -> list[Row]:
    source, pages = torch.Generator().manual_seed(0), [9, 3, 5, 1, 7]
    return [
        Row(torch.randint(0, 256, (length,), generator=source).tolist(),
            [pages.pop() for _ in range(-(-length // 16))], lane=lane)
        for lane, length in enumerate(LENGTHS)
    ]  # fmt: skip


def logits(case: Case, ops: Ops, kv_dtype: str) -> list[torch.Tensor]:
    rows = make_rows()
    run_chunks(case.model(ops), case.cache(kv_dtype), rows, CHUNKS, 16)
    return [torch.cat(row.logits) for row in rows]


@pytest.mark.parametrize("name", ["v32", "v4", "minimax_m3"])
def test_logits_equal_the_oracles(name: str, tmp_path: Path) -> None:
    case, chosen = Case.make(tmp_path, name), []
    for row, actual in zip(make_rows(), logits(case, mixed(chosen), "float32"), strict=True):
        assert_logits(f"{name}: {len(row.ids)} tokens", actual, oracle_logits(case.oracle, row.ids))
    assert chosen, "no row chooses"


@pytest.mark.parametrize("name", ["v32", "v4"])
def test_bytes_are_read_as_by_torch(name: str, tmp_path: Path) -> None:
    case, chosen = Case.make(tmp_path, name), []
    actual = logits(case, mixed(chosen), "fp8")
    for ours, expected in zip(actual, logits(case, kernels.load("torch"), "fp8"), strict=True):
        assert_logits(name, ours, expected)
    assert chosen, "no row chooses"
