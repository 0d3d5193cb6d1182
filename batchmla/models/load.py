"""From a model's folder and config to a model that runs, or to the bytes it would take."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from batchmla.errors import JobError
from batchmla.kernels.ops import Ops
from batchmla.layers.block import Block
from batchmla.models import get_family
from batchmla.models.base import Model
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.checkpoint import Checkpoint
from batchmla.weights.count import WeightCount, count_weights
from batchmla.weights.faults import Faults
from batchmla.weights.integrity import check_tied, survey
from batchmla.weights.load import fill_random, load, log_skipped
from batchmla.weights.rules import Rule, Skip

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
) -> Model:
    """The model of `folder` on this rank; the checkpoint is checked whole before a tensor is
    read."""
    family = get_family(raw_config)
    config = family.Config.from_hf(raw_config)
    refuse_quantised(folder, config.quantization)
    start_s = time.monotonic()
    model = family.build(config, par, ops)
    assert isinstance(model, Block), f"{type(model)} has no weights"
    if load_format == "dummy":
        fill_random(model, ops, dtype, device)
    elif load_format == "safetensors":
        rules = family.rules(config)
        checkpoint = _open_whole(folder, rules, placement)
        load(model, checkpoint, rules, placement, ops, dtype, device)
    else:
        raise JobError(
            f"model.load_format {load_format!r} is not known; known are safetensors, dummy"
        )
    logger.info("weights of %s loaded in %.1f s", folder, time.monotonic() - start_s)
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
    config = family.Config.from_hf(raw_config)
    refuse_quantised(folder, config.quantization)
    if load_format == "safetensors":
        found = Faults(folder) if faults is None else faults
        checkpoint = Checkpoint.survey(folder, found)
        survey(checkpoint, family.rules(config), placement, found)
        if faults is None:
            found.refuse()


def _open_whole(folder: Path, rules: Sequence[Rule | Skip], placement: Placement) -> Checkpoint:
    """A checkpoint without a fault; says what it will not use."""
    faults = Faults(folder)
    checkpoint = Checkpoint.survey(folder, faults)
    skipped = survey(checkpoint, rules, placement, faults)
    if not faults.count:
        check_tied(checkpoint, rules, faults, is_whole=True)
    faults.refuse()
    log_skipped(skipped)
    return checkpoint


def refuse_quantised(folder: Path, method: str | None) -> None:
    """Quantised weights are known to `plan` and `inspect` and cannot be loaded yet."""
    if method is not None:
        raise JobError(
            f"the weights in {folder} are quantised (quantization_config: {method}), which cannot "
            f"be run yet; use a bfloat16, float16 or float32 copy"
        )


def count_model(
    raw_config: Mapping[str, Any],
    placement: Placement,
    ops: Ops,
    dtype: torch.dtype,
) -> WeightCount:
    """Parameters and weight bytes of one rank, from the config alone."""
    family = get_family(raw_config)
    model = family.build(family.Config.from_hf(raw_config), Par(placement), ops)
    assert isinstance(model, Block), f"{type(model)} has no weights"
    return count_weights(model, ops, dtype)
