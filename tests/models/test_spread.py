"""Experts dealt to ranks, and ranks that outnumber the kv heads: the logits of one rank."""

import json
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

FAMILIES = ("v4", "qwen3_moe", "minimax_m2", "minimax_m3", "v3", "v32", "kimi_linear")


def test_holders_of_experts_give_the_logits_of_one_rank(tmp_path: Path) -> None:
    """Two kv heads on four ranks too: each is held twice. v4 has two output groups, for two."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(2, 256, length).tolist() for length in (30, 9, 41)]
    folders = []
    for name in FAMILIES:
        (tmp_path / name).mkdir()
        write_tiny(tmp_path / name, name)
        folders.append(tmp_path / name)
    found = {}
    for num_ranks, first in ((1, 0), (2, 0), (4, 1)):
        scratch = tmp_path / f"{num_ranks}"
        scratch.mkdir()
        found[num_ranks] = logits_on_ranks(
            folders[first:], prompts, scratch, num_ranks, expert=num_ranks
        )
    (alone,) = found[1]
    for num_ranks, first in ((2, 0), (4, 1)):
        for rank in found[num_ranks]:
            for name, rows, expected in zip(FAMILIES[first:], rank, alone[first:], strict=True):
                for one, other in zip(rows, expected, strict=True):
                    torch.testing.assert_close(
                        one, other, rtol=1e-4, atol=1e-4,
                        msg=lambda text, where=(name, num_ranks): f"{where}: {text}",
                    )  # fmt: skip


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
