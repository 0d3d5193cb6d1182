"""Fills a built model from a checkpoint or with random values: slice, cast, pack, free."""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from batchmla.kernels.ops import Ops
from batchmla.kernels.quant import Quantised, Scheme
from batchmla.layers.block import Block, Weight
from batchmla.placement import Placement
from batchmla.weights.checkpoint import FLOATS, Checkpoint
from batchmla.weights.faults import REVISION, Faults, counted
from batchmla.weights.quant import Storage, is_kept, scheme_of
from batchmla.weights.quant_config import Quantisation
from batchmla.weights.quant_random import random_quantised
from batchmla.weights.quant_read import read_expanded, read_quantised
from batchmla.weights.rules import Piece, Rule, Skip, expand, refuse_cuts
from batchmla.weights.staging import Staging

logger = logging.getLogger(__name__)

INTEGERS = ("I64", "I32")
HEAD = "head.weight"  # the target of an output head of its own
LOG_EVERY_S = 5.0  # while weights are read


def check(
    checkpoint: Checkpoint,
    rules: Sequence[Rule | Skip],
    placement: Placement,
    quantisation: Quantisation | None = None,
) -> dict[Skip, int]:
    """Every missing, unexpected, mis-shaped or unreadable tensor in one `JobError`; returns how
    many tensors each rule skips.
    """
    faults = Faults(checkpoint.folder)
    skipped = find_faults(checkpoint, rules, placement, faults, quantisation)
    faults.refuse()
    return skipped


def find_faults(
    checkpoint: Checkpoint,
    rules: Sequence[Rule | Skip],
    placement: Placement,
    faults: Faults,
    quantisation: Quantisation | None = None,
) -> dict[Skip, int]:
    """The same with the faults added to `faults`; tensors that the checkpoint already knows to be
    lost are none of them."""
    if placement.num_ranks > 1:
        refuse_cuts(rules, placement)
    every = Placement()  # whatever this rank takes, all must be there
    wanted = {piece.source: piece.shape for piece in expand(rules, every)}
    ids = {
        piece.source
        for rule in rules
        if isinstance(rule, Rule) and rule.is_integer
        for piece in expand([rule], every)
    }
    entries = checkpoint.entries
    storage = Storage(entries, quantisation)
    beside = {name: storage.companions(name) for name in wanted}
    known = {name for names in beside.values() for name in names}
    skips = [rule for rule in rules if isinstance(rule, Skip)]
    skipped: dict[Skip, int] = {}
    heads = {rule.source for rule in rules if isinstance(rule, Rule) and rule.target == HEAD}
    untied = ", and config.json does not tie the head to the embedding (tie_word_embeddings)"
    missing = [
        f"{name} is missing{untied if name in heads else ''}"
        for name in wanted
        if name not in entries and not beside[name] and name not in checkpoint.lost
    ]
    unexpected, misshaped, quantised = list[str](), list[str](), list[str]()
    for name, entry in entries.items():
        if name in known:
            continue
        if name not in wanted:
            skip = next((skip for skip in skips if skip.covers(name)), None)
            if skip is None:
                unexpected.append(f"{name} is unexpected")
            else:
                skipped[skip] = skipped.get(skip, 0) + 1
        elif entry.dtype in (*FLOATS, *INTEGERS) and entry.shape != wanted[name]:
            misshaped.append(f"{name} has shape {list(entry.shape)}, not {list(wanted[name])}")
        elif name in ids and entry.dtype not in INTEGERS:
            misshaped.append(f"{name} is {entry.dtype}, not one of {', '.join(INTEGERS)}")
    lost = checkpoint.lost
    for name, shape in wanted.items():
        if name not in ids and not (lost and lost.intersection(storage.parts(name))):
            quantised += storage.faults(name, shape)
    if quantisation is not None and not quantised and not checkpoint.lost:
        quantised += storage.idle(wanted)
    faults.add("missing", missing, REVISION)
    faults.add("unexpected", unexpected, REVISION)
    faults.add("of another shape or dtype", misshaped, REVISION)
    faults.add("quantised otherwise", quantised, REVISION)
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
    quantisation: Quantisation | None = None,
    *,
    keeps_quantised: bool = False,
    log_every_s: float = LOG_EVERY_S,
    may_go_on: Callable[[], None] = lambda: None,
) -> None:
    """Reads this rank's slices, weight by weight in the files' order; `check` must have passed.
    Before each one `may_go_on` is called, which may raise.

    Quantised matrices stay so with `keeps_quantised`, as far as `ops` reads them; else, and where
    parts of one weight are of different forms, they are expanded.
    """
    weights = dict(model.named_weights())
    by_target: dict[str, list[Piece]] = {}
    for piece in expand(rules, placement):
        by_target.setdefault(piece.target, []).append(piece)
    source = _Source(checkpoint, Storage(checkpoint.entries, quantisation), Staging(device))
    schemes = {
        target: source.scheme(pieces, dtype)
        for target, pieces in by_target.items()
        if keeps_quantised and is_kept(weights[target])
    }
    unread = Counter(file for pieces in by_target.values() for file in source.files(pieces))
    progress = _Progress(by_target, log_every_s)
    for target in sorted(by_target, key=lambda target: source.place(by_target[target][0])):
        may_go_on()
        weight, pieces, scheme = weights[target], by_target[target], schemes.get(target)
        if scheme is None:
            weight.fill(source.plain(pieces, weight, dtype, device), ops)
        else:
            weight.fill(source.quantised(pieces, scheme, weight.shape, device), ops)
        for file in source.files(pieces):
            unread[file] -= 1
            if not unread[file]:
                checkpoint.release(file)
        progress.filled(target)
    checkpoint.close()
    fill_tied(weights.values(), ops)
    empty = [name for name, weight in weights.items() if not weight.is_filled]
    assert not empty, f"no rule fills {empty}"


class _Progress:
    """Says now and then how many layers are there."""

    def __init__(self, targets: Iterable[str], log_every_s: float) -> None:
        self._missing = Counter(layer for each in targets if (layer := _layer(each)))
        self._num_layers = len(self._missing)
        self._log_every_s = log_every_s
        self._logged_s = time.monotonic()

    def filled(self, target: str) -> None:
        """One weight more."""
        layer = _layer(target)
        if layer is None:
            return
        self._missing[layer] -= 1
        now_s = time.monotonic()
        if not self._missing[layer] and now_s - self._logged_s >= self._log_every_s:
            done = sum(not count for count in self._missing.values())
            logger.info("loading %d/%d layers", done, self._num_layers)
            self._logged_s = now_s


def _layer(target: str) -> str | None:
    """The index in layers.3.ffn.experts_up; None outside layers."""
    first, _, rest = target.partition(".")
    return rest.partition(".")[0] if first == "layers" else None


class _Source:
    """The tensors of a checkpoint as the weights want them."""

    def __init__(self, checkpoint: Checkpoint, storage: Storage, staging: Staging) -> None:
        self._staging = staging
        self._checkpoint = checkpoint
        self._storage = storage

    def place(self, piece: Piece) -> tuple[str, int]:
        """Where its values begin: file and byte."""
        stored = self._storage.find(piece.source)
        entry = self._checkpoint.entries[piece.source if stored is None else stored.codes]
        return str(entry.file), entry.start

    def files(self, pieces: Sequence[Piece]) -> set[Path]:
        """All that the pieces are read from."""
        found = set()
        for piece in pieces:
            stored = self._storage.find(piece.source)
            names = (piece.source,) if stored is None else stored.names
            found |= {self._checkpoint.entries[name].file for name in names}
        return found

    def scheme(self, pieces: Sequence[Piece], dtype: torch.dtype) -> Scheme | None:
        """How the weight may be kept quantised."""
        stored = [self._storage.find(piece.source) for piece in pieces]
        forms = [None if each is None else each.form for each in stored]
        return scheme_of(pieces, forms, dtype)

    def quantised(
        self,
        pieces: Sequence[Piece],
        scheme: Scheme,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> Quantised:
        """Codes and scales of all pieces."""
        stored = [each for piece in pieces if (each := self._storage.find(piece.source))]
        return read_quantised(
            self._checkpoint, pieces, stored, scheme, shape, device, self._staging
        )

    def plain(
        self, pieces: Sequence[Piece], weight: Weight, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Values of all pieces, stacked in their order."""
        tensor = torch.empty(weight.shape, dtype=weight.dtype(dtype), device=device)
        row_of: dict[int | None, int] = {}
        for piece in pieces:
            stored = self._storage.find(piece.source)
            if stored is None:
                part = self._checkpoint.read(piece.source, piece.slices)
            else:
                part = read_expanded(self._checkpoint, piece, stored, tensor.dtype)
            row = row_of.get(piece.expert, 0)
            place = tensor if piece.expert is None else tensor[piece.expert]
            self._staging.copy(place[row : row + part.shape[0]], part)
            row_of[piece.expert] = row + part.shape[0]
        rows = weight.shape[0] if pieces[0].expert is None else weight.shape[1]
        assert set(row_of.values()) == {rows}, f"{pieces[0].target}: {row_of} rows of {rows}"
        return tensor


def fill_tied(weights: Iterable[Weight], ops: Ops) -> None:
    """Tied weights, once their sources are there."""
    for weight in weights:
        if weight.tied is not None:
            weight.fill(weight.tied.tensor, ops)


def fill_random(
    model: Block,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Mapping[str, Scheme] | None = None,
) -> None:
    """Matrices N(0, 1/in), norms 1, biases N(0, 0.1²): seeded by name, the same on every run. Those
    that `schemes` names are random codes of that size."""
    weights = dict(model.named_weights())
    for name, weight in weights.items():
        if weight.tied is not None:
            continue
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        scheme = None if schemes is None else schemes.get(name)
        if scheme is not None:
            weight.fill(random_quantised(scheme, weight.shape, generator, device), ops)
            continue
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
