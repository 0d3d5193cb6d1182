"""From a model's folder and config to a model that runs, or to the bytes it would take."""

import logging
import time
from collections.abc import Mapping
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
from batchmla.weights.load import check, fill_random, load, log_skipped

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
        checkpoint = Checkpoint.open(folder)
        rules = family.rules(config)
        log_skipped(check(checkpoint, rules, placement))
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
) -> None:
    """What `load_model` would refuse, from the headers of all files; no tensor is read."""
    family = get_family(raw_config)
    config = family.Config.from_hf(raw_config)
    refuse_quantised(folder, config.quantization)
    if load_format == "safetensors":
        check(Checkpoint.open(folder), family.rules(config), placement)


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
