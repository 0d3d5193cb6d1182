"""A whole checkpoint checked from its headers and small tensors, in seconds: all its faults at
once, before anything is allocated or read for the model."""

from collections.abc import Iterator, Sequence

import torch

from batchmla.placement import Placement
from batchmla.weights.checkpoint import Checkpoint
from batchmla.weights.faults import Faults
from batchmla.weights.integrity_values import check_values
from batchmla.weights.load import HEAD, find_faults
from batchmla.weights.quant_config import Quantisation
from batchmla.weights.rules import Rule, Skip

HEADS = ("lm_head.weight", HEAD)  # what a head's tensor is called, behind a prefix
EMBEDDING = "embed.weight"  # the target of the embedding
SAMPLED_ROWS = 64
CHUNK_BYTES = 64 * 2**20
UNTIE = (
    "set tie_word_embeddings to false in config.json to use the head, or true with the model's own "
    "weights"
)


def survey(
    checkpoint: Checkpoint,
    rules: Sequence[Rule | Skip],
    placement: Placement,
    faults: Faults,
    quantisation: Quantisation | None = None,
) -> dict[Skip, int]:
    """Adds what headers, small tensors and a sample of a tied head show; returns how many tensors
    each rule skips."""
    skipped = find_faults(checkpoint, rules, placement, faults, quantisation)
    check_values(checkpoint, rules, faults)
    check_tied(checkpoint, rules, faults, is_whole=False)
    return skipped


def check_tied(
    checkpoint: Checkpoint, rules: Sequence[Rule | Skip], faults: Faults, *, is_whole: bool
) -> None:
    """A head beside a tied embedding must equal it: which of two is meant nobody can tell.

    `is_whole` reads all of both; else a few rows, spread over the vocabulary.
    """
    pair = _tied_pair(checkpoint, rules)
    if pair is None:
        return
    embedding, head = (checkpoint.entries[name] for name in pair)
    if head.shape != embedding.shape:
        why = f"has shape {list(head.shape)}, not the embedding's {list(embedding.shape)}"
    elif _differ(checkpoint, pair, is_whole=is_whole):
        why = f"differs from {pair[0]}"
    else:
        return
    text = f"{pair[1]} {why}, though config.json ties them (tie_word_embeddings)"
    faults.add("not tied", [text], UNTIE)


def _tied_pair(checkpoint: Checkpoint, rules: Sequence[Rule | Skip]) -> tuple[str, str] | None:
    """(embedding, head) of a tied model whose checkpoint has both, readable."""
    by_target = {rule.target: rule.source for rule in rules if isinstance(rule, Rule)}
    embedding = by_target.get(EMBEDDING)
    if HEAD in by_target or embedding is None:
        return None
    prefix = embedding.removesuffix("embed.weight").removesuffix("model.embed_tokens.weight")
    names = [prefix + name for name in HEADS]
    head = next((name for name in names if name in checkpoint.entries), None)
    found = checkpoint.entries.get(embedding)
    if head is None or found is None or len(found.shape) != 2:
        return None
    files = {checkpoint.entries[name].file for name in (embedding, head)}
    return None if files & checkpoint.damaged else (embedding, head)


def _differ(checkpoint: Checkpoint, pair: tuple[str, str], *, is_whole: bool) -> bool:
    """Whether some row of two tensors of one shape differs in its values; NaN equals NaN."""
    for rows in _rows(checkpoint, pair[0], is_whole=is_whole):
        one, other = (checkpoint.read(name, (rows, slice(None))).float() for name in pair)
        if not torch.equal(one.nan_to_num(), other.nan_to_num()):
            return True
    return False


def _rows(checkpoint: Checkpoint, name: str, *, is_whole: bool) -> Iterator[slice]:
    entry = checkpoint.entries[name]
    num_rows = entry.shape[0]
    if is_whole:
        step = max(1, CHUNK_BYTES * num_rows // max(1, entry.nbytes))
        yield from (slice(row, min(row + step, num_rows)) for row in range(0, num_rows, step))
        return
    last = min(SAMPLED_ROWS, num_rows) - 1
    for index in range(last + 1):
        row = index * (num_rows - 1) // max(1, last)
        yield slice(row, row + 1)
