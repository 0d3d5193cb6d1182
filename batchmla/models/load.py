"""From a model's folder and config to a model that runs, or to the bytes it would take."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from batchmla.errors import JobError
from batchmla.kernels.ops import Ops
from batchmla.kernels.quant import Scheme
from batchmla.layers.block import Block
from batchmla.models import get_family
from batchmla.models.base import Family, Model
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.checkpoint import Checkpoint
from batchmla.weights.count import WeightCount, count_weights
from batchmla.weights.faults import Faults
from batchmla.weights.integrity import check_tied, survey
from batchmla.weights.load import fill_random, load, log_skipped
from batchmla.weights.quant import expected_schemes
from batchmla.weights.quant_config import Quantisation, read_quantisation
from batchmla.weights.rules import Rule, Skip, refuse_dealing

logger = logging.getLogger(__name__)


def load_model(
    folder: Path,
    raw_config: Mapping[str, Any],
    placement: Placement,
    par: Par,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "safetensors",
    *,
    keeps_quantised: bool = False,
) -> Model:
    """The model of `folder` on this rank; the checkpoint is checked whole before a tensor is
    read. Quantised weights are expanded to `dtype` unless it `keeps_quantised`. Raises what ends
    another rank meanwhile."""
    family = get_family(raw_config)
    config, said = family.Config.from_hf(raw_config), read_quantisation(raw_config)
    start_s, read_bytes = time.monotonic(), 0
    rules = family.rules(config)
    refuse_dealing(rules, placement)
    model = family.build(config, par, ops)
    assert isinstance(model, Block), f"{type(model)} has no weights"
    if load_format == "dummy":
        kept = said if keeps_quantised else None
        schemes = _expected_schemes(model, rules, placement, kept, dtype)
        fill_random(model, ops, dtype, device, schemes)
    elif load_format == "safetensors":
        checkpoint = _open_whole(folder, family, rules, placement, said)
        checked_bytes = checkpoint.read_bytes
        load(
            model, checkpoint, rules, placement, ops, dtype, device, said,
            keeps_quantised=keeps_quantised, may_go_on=par.check,
        )  # fmt: skip
        read_bytes = checkpoint.read_bytes - checked_bytes
    else:
        raise JobError(
            f"model.load_format {load_format!r} is not known; known are safetensors, dummy"
        )
    logger.info(
        "weights of %s loaded in %.1f s, %d bytes read",
        folder, time.monotonic() - start_s, read_bytes,
    )  # fmt: skip
    return model


def check_model(
    folder: Path,
    raw_config: Mapping[str, Any],
    placement: Placement,
    load_format: str = "safetensors",
    faults: Faults | None = None,
) -> None:
    """What `load_model` would refuse, from the headers and small tensors of all files.

    With `faults` the checkpoint's own are added there, for the caller to raise.
    """
    family = get_family(raw_config)
    config, said = family.Config.from_hf(raw_config), read_quantisation(raw_config)
    if load_format == "safetensors":
        found = Faults(folder) if faults is None else faults
        checkpoint = _survey(folder, family, found)
        survey(checkpoint, family.rules(config), placement, found, said)
        if faults is None:
            found.refuse()


def _survey(folder: Path, family: Family, faults: Faults) -> Checkpoint:
    """Its tensors by the names of the family's rules."""
    checkpoint = Checkpoint.survey(folder, faults)
    published = getattr(family, "published", None)
    return checkpoint if published is None else checkpoint.named(published(checkpoint.entries))


def _open_whole(
    folder: Path,
    family: Family,
    rules: Sequence[Rule | Skip],
    placement: Placement,
    said: Quantisation | None,
) -> Checkpoint:
    """A checkpoint without a fault; says what it will not use."""
    faults = Faults(folder)
    checkpoint = _survey(folder, family, faults)
    skipped = survey(checkpoint, rules, placement, faults, said)
    if not faults.count:
        check_tied(checkpoint, rules, faults, is_whole=True)
    faults.refuse()
    log_skipped(skipped)
    return checkpoint


def _expected_schemes(
    model: Block,
    rules: Sequence[Rule | Skip],
    placement: Placement,
    said: Quantisation | None,
    dtype: torch.dtype,
) -> dict[str, Scheme]:
    """Of the weights that stay quantised, from the config alone."""
    if said is None:
        return {}
    return expected_schemes(dict(model.named_weights()), rules, placement, said, dtype)


def count_model(
    raw_config: Mapping[str, Any],
    placement: Placement,
    ops: Ops,
    dtype: torch.dtype,
    *,
    keeps_quantised: bool = False,
) -> WeightCount:
    """Parameters and weight bytes of one rank, from the config alone."""
    family = get_family(raw_config)
    config = family.Config.from_hf(raw_config)
    refuse_dealing(family.rules(config), placement)
    model = family.build(config, Par(placement), ops)
    assert isinstance(model, Block), f"{type(model)} has no weights"
    said = read_quantisation(raw_config) if keeps_quantised else None
    schemes = _expected_schemes(model, family.rules(config), placement, said, dtype)
    return count_weights(model, ops, dtype, schemes)
