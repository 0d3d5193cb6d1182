"""Embedding, dense layer and head that attention groups hold together, on several gloo ranks: each
group with rows of its own, one without any."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gloo_ranks import bring, run_ranks

from batchmla import kernels
from batchmla.kernels.block_sparse_ops import OaiGate
from batchmla.layers.across import PIECE_ROWS
from batchmla.layers.block import Block
from batchmla.layers.embed import Embedding, Head
from batchmla.layers.mlp import GatedMlp
from batchmla.layers.oai_moe import oai_mlp
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import Piece, Rule, expand

VOCAB, WIDTH, FEATURES = 64, 16, 96
NUM_RANKS = 4
GROUP_TOKENS = (5, 0, PIECE_ROWS // NUM_RANKS + 7, 2)  # of one group more than a piece takes
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A placement without its rank, and features that share a scale."""

    tensor: int
    groups: int
    unit: int = 1
    is_whole: bool = False

    def place(self, rank: int) -> Placement:
        return Placement(
            tensor=self.tensor,
            attention_data=self.groups,
            rank=rank,
            has_whole_groups=self.is_whole,
        )


class Layers(Block):
    """What a model has of them, in its order."""

    def __init__(self, par: Par, unit: int, *, is_tied: bool = False) -> None:
        ops = kernels.load("cpu")
        gate = OaiGate(alpha=1.7, limit=1.0)
        self.embed = Embedding(par, VOCAB, WIDTH, is_tied=is_tied)
        self.dense = GatedMlp(par, ops, WIDTH, FEATURES, group_unit=unit)
        self.gated = oai_mlp(par, ops, WIDTH, FEATURES, gate, group_unit=unit)
        self.head = Head(par, ops, VOCAB, WIDTH, self.embed if is_tied else None)

    def fill(self, place: Placement, unit: int) -> None:
        """The same whole weights on any placement, cut as a checkpoint's are."""
        ops, weights = kernels.load("cpu"), dict(self.named_weights())
        parts: dict[str, list[torch.Tensor]] = {}
        for index, piece in enumerate(pieces(place, unit)):
            generator = torch.Generator().manual_seed(index)
            whole = torch.randn(piece.shape, generator=generator) * 0.3
            parts.setdefault(piece.target, []).append(whole[piece.slices])
        for target, tensors in parts.items():
            weights[target].fill(torch.cat(tensors).contiguous(), ops)


def pieces(place: Placement, unit: int) -> Iterator[Piece]:
    """Of an untied model."""
    rules = [
        Rule(source="embed", target="embed.weight", shape=(VOCAB, WIDTH), shard_axis=0,
             group_axis=1),
        Rule(source="head", target="head.weight", shape=(VOCAB, WIDTH), shard_axis=0,
             group_axis=0),
    ]  # fmt: skip
    for name in ("dense", "gated"):
        for source, axis in (("gate", 0), ("up", 0), ("down", 1)):
            target = f"{name}.{'up' if axis == 0 else 'down'}.weight"
            shape = (FEATURES, WIDTH) if axis == 0 else (WIDTH, FEATURES)
            rules.append(
                Rule(source=f"{name}.{source}", target=target, shape=shape, shard_axis=axis,
                     group_axis=axis, group_unit=unit)
            )  # fmt: skip
    return expand(rules, place)


def tokens_of(group: int) -> torch.Tensor:
    """Ids of an attention group's rows."""
    generator = torch.Generator().manual_seed(group + 1)
    return torch.randint(VOCAB, (GROUP_TOKENS[group],), generator=generator)


def rows_of(group: int) -> torch.Tensor:
    """The rows themselves."""
    generator = torch.Generator().manual_seed(group + 9)
    return torch.randn(GROUP_TOKENS[group], WIDTH, generator=generator)


def run_layers(par: Par, layers: Layers) -> dict[str, torch.Tensor]:
    """What the rank's group gets of each; of the head, logits of its first three rows at most."""
    group, par.group_rows = par.placement.group, GROUP_TOKENS[: par.placement.attention_data]
    ids_T, x_TM = tokens_of(group), rows_of(group)
    if len(ids_T):
        found = {
            "embed": layers.embed.forward(ids_T),
            "dense": layers.dense.forward(x_TM),
            "gated": layers.gated.forward(x_TM),
        }
    else:
        found = {}
        for layer in (layers.embed, layers.dense, layers.gated):
            layer.serve(torch.float32, CPU)
    par.group_rows = [min(count, 3) for count in par.group_rows]
    if len(x_TM):
        found["head"] = layers.head.forward(x_TM[:3])
    else:
        layers.head.serve(torch.float32, CPU)
    return found


@dataclass
class Found:
    """Of one rank and case."""

    outputs: dict[str, torch.Tensor]
    calls: dict[str, int]
    shapes: dict[str, tuple[int, ...]]


def run_on_ranks(scratch: Path, cases: list[Case]) -> list[list[Found]]:
    """Per rank, by case."""
    return run_ranks(_run_rank, NUM_RANKS, scratch, cases)


def _run_rank(rank: int, scratch: Path, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    found = []
    for index, case in enumerate(cases):
        place = case.place(rank)
        par = Par.connect(place, scratch / f"store{index}", 180)
        layers = Layers(par, case.unit)
        layers.fill(place, case.unit)
        outputs = run_layers(par, layers)
        calls = {kind: traffic.calls for kind, traffic in par.traffic.items()}
        shapes = {name: weight.shape for name, weight in layers.named_weights()}
        found.append(Found(outputs, calls, shapes))
        par.close()
    bring(found, rank, scratch)
