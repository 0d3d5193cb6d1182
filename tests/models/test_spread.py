"""Experts dealt to ranks, and ranks that outnumber the kv heads: the logits of one rank."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import logits_on_ranks
from tiny import write_tiny

from batchmla import kernels
from batchmla.errors import JobError
from batchmla.models import get_family
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import expand

PROMPTS = [
    np.random.default_rng(4 + length).integers(2, 256, length).tolist() for length in (30, 9, 41)
]
FAMILIES = ("v4", "qwen3_moe", "minimax_m2", "minimax_m3", "v3", "v32", "kimi_linear")


CUT_IN_FOUR = {"v4": {"o_groups": 4}}  # the tiny one has two output groups


def write_models(folder: Path, names: Sequence[str], **changes: dict[str, int]) -> list[Path]:
    """A checkpoint of each family."""
    folders = []
    for name in names:
        folders.append(folder / name)
        folders[-1].mkdir()
        write_tiny(folders[-1], name, **changes.get(name, {}))
    return folders


def check_ranks(folders: list[Path], scratch: Path, found: list[list[list[torch.Tensor]]]) -> None:
    """Every rank's logits against those of one rank."""
    scratch.mkdir()
    (alone,) = logits_on_ranks(folders, PROMPTS, scratch, 1)
    for rank in found:
        for folder, rows, expected in zip(folders, rank, alone, strict=True):
            for one, other in zip(rows, expected, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=1e-4, atol=1e-4,
                    msg=lambda text, where=folder.name: f"{where}: {text}",
                )  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_holders_of_experts_give_the_logits_of_one_rank(tmp_path: Path, num_ranks: int) -> None:
    """Two kv heads on four ranks too: each is held twice."""
    names = FAMILIES if num_ranks == 2 else FAMILIES[1:]
    folders = write_models(tmp_path, names)
    found = logits_on_ranks(folders, PROMPTS, tmp_path, num_ranks, expert=num_ranks)
    check_ranks(folders, tmp_path / "alone", found)


def test_four_ranks_that_cut_everything_give_the_logits_of_one(tmp_path: Path) -> None:
    """Heads, widths of experts and vocabulary in four."""
    folders = write_models(tmp_path, (*FAMILIES, "llama"), **CUT_IN_FOUR)
    check_ranks(folders, tmp_path / "alone", logits_on_ranks(folders, PROMPTS, tmp_path, 4))


@pytest.mark.parametrize("name", ["qwen3_moe", "minimax_m2", "minimax_m3", "v3", "v4"])
def test_ranks_read_every_expert_once(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path, name)
    raw = json.loads((tmp_path / "config.json").read_text())
    family = get_family(raw)
    rules = family.rules(family.Config.from_hf(raw))
    whole = sorted(each.source for each in expand(rules, Placement()) if each.expert is not None)
    dealt = [
        piece
        for rank in range(2)
        for piece in expand(rules, Placement(tensor=2, expert=2, rank=rank))
        if piece.expert is not None
    ]
    assert sorted(piece.source for piece in dealt) == whole
    assert all(piece.slices == tuple(map(slice, [0] * 2, piece.shape)) for piece in dealt)
    half = len({each.expert for each in expand(rules, Placement()) if each.expert is not None}) // 2
    assert {piece.expert for piece in dealt} == set(range(half))


def test_experts_that_cannot_be_dealt_are_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3_moe", num_experts=6)
    raw = json.loads((tmp_path / "config.json").read_text())
    family = get_family(raw)
    with pytest.raises(JobError, match="6 experts cannot be dealt to 4 holders"):
        family.build(
            family.Config.from_hf(raw),
            Par(Placement(expert=4, attention_data=4)),
            kernels.load("cpu"),
        )
