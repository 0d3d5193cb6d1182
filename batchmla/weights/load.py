"""Fills a built model from a checkpoint or with random values: slice, cast, pack, free."""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from batchmla.kernels.ops import Ops
from batchmla.layers.block import Block, Weight
from batchmla.placement import Placement
from batchmla.weights.checkpoint import FLOATS, Checkpoint
from batchmla.weights.faults import REVISION, Faults, counted
from batchmla.weights.rules import Piece, Rule, Skip, expand

logger = logging.getLogger(__name__)

INTEGERS = ("I64", "I32")
HEAD = "head.weight"  # the target of an output head of its own


def check(
    checkpoint: Checkpoint, rules: Sequence[Rule | Skip], placement: Placement
) -> dict[Skip, int]:
    """Every missing, unexpected, mis-shaped or unreadable tensor in one `JobError`; returns how
    many tensors each rule skips.
    """
    faults = Faults(checkpoint.folder)
    skipped = find_faults(checkpoint, rules, placement, faults)
    faults.refuse()
    return skipped


def find_faults(
    checkpoint: Checkpoint, rules: Sequence[Rule | Skip], placement: Placement, faults: Faults
) -> dict[Skip, int]:
    """The same with the faults added to `faults`; tensors that the checkpoint already knows to be
    lost are none of them."""
    wanted = {piece.source: piece.shape for piece in expand(rules, placement)}
    ids = {
        piece.source
        for rule in rules
        if isinstance(rule, Rule) and rule.is_integer
        for piece in expand([rule], placement)
    }
    entries = checkpoint.entries
    skips = [rule for rule in rules if isinstance(rule, Skip)]
    skipped: dict[Skip, int] = {}
    heads = {rule.source for rule in rules if isinstance(rule, Rule) and rule.target == HEAD}
    untied = ", and config.json does not tie the head to the embedding (tie_word_embeddings)"
    missing = [
        f"{name} is missing{untied if name in heads else ''}"
        for name in wanted
        if name not in entries and name not in checkpoint.lost
    ]
    unexpected, misshaped, quantised = list[str](), list[str](), list[str]()
    for name, entry in entries.items():
        if name not in wanted:
            skip = next((skip for skip in skips if skip.covers(name)), None)
            if skip is None:
                unexpected.append(f"{name} is unexpected")
            else:
                skipped[skip] = skipped.get(skip, 0) + 1
        elif entry.shape != wanted[name]:
            misshaped.append(f"{name} has shape {list(entry.shape)}, not {list(wanted[name])}")
        elif name in ids:
            if entry.dtype not in INTEGERS:
                misshaped.append(f"{name} is {entry.dtype}, not one of {', '.join(INTEGERS)}")
        elif entry.dtype not in FLOATS:
            quantised.append(f"{name} is {entry.dtype}: quantised weights cannot be loaded yet")
    faults.add("missing", missing, REVISION)
    faults.add("unexpected", unexpected, REVISION)
    faults.add("of another shape or dtype", misshaped, REVISION)
    faults.add("quantised", quantised, REVISION)
    return skipped


def log_skipped(skipped: Mapping[Skip, int]) -> None:
    """One line a rule."""
    for skip, count in skipped.items():
        logger.info("skipped %s: %s", counted(count, "tensor"), skip.reason)


def load(
    model: Block,
    checkpoint: Checkpoint,
    rules: Sequence[Rule | Skip],
    placement: Placement,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Reads this rank's slices, weight by weight; `check` must have passed."""
    weights = dict(model.named_weights())
    by_target: dict[str, list[Piece]] = {}
    for piece in expand(rules, placement):
        by_target.setdefault(piece.target, []).append(piece)
    for target, pieces in by_target.items():
        weight = weights[target]
        tensor = torch.empty(weight.shape, dtype=weight.dtype(dtype), device=device)
        row_of: dict[int | None, int] = {}
        for piece in pieces:
            part = checkpoint.read(piece.source, piece.slices)
            row = row_of.get(piece.expert, 0)
            place = tensor if piece.expert is None else tensor[piece.expert]
            place[row : row + part.shape[0]].copy_(part)
            row_of[piece.expert] = row + part.shape[0]
        rows = weight.shape[0] if pieces[0].expert is None else weight.shape[1]
        assert set(row_of.values()) == {rows}, f"{target}: {row_of} rows of {rows}"
        weight.fill(tensor, ops)
    checkpoint.close()
    fill_tied(weights.values(), ops)
    empty = [name for name, weight in weights.items() if not weight.is_filled]
    assert not empty, f"no rule fills {empty}"


def fill_tied(weights: Iterable[Weight], ops: Ops) -> None:
    """Tied weights, once their sources are there."""
    for weight in weights:
        if weight.tied is not None:
            weight.fill(weight.tied.tensor, ops)


def fill_random(model: Block, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
    """Matrices N(0, 1/in), norms 1, biases N(0, 0.1²): seeded by name, the same on every run."""
    weights = dict(model.named_weights())
    for name, weight in weights.items():
        if weight.tied is not None:
            continue
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        tensor = torch.empty(weight.shape, dtype=weight.dtype(dtype))
        if weight.is_integer:  # the same few ids for every token
            tensor.copy_(torch.arange(weight.shape[-1]).expand(weight.shape))
        elif len(weight.shape) > 1:
            tensor.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            tensor.normal_(0, 0.1, generator=generator)
        else:
            tensor.fill_(1.0 - weight.offset)
        weight.fill(tensor.to(device), ops)
    fill_tied(weights.values(), ops)
