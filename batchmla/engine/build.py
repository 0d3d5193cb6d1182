"""What one rank of an engine is made of, from a configuration with nothing left open."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from batchmla import kernels
from batchmla.engine.config import EngineConfig
from batchmla.engine.forward import Forward, is_out_of_memory
from batchmla.engine.graphs import CudaRecorder
from batchmla.errors import DeviceError
from batchmla.models import get_family
from batchmla.models.base import Model
from batchmla.models.load import load_model
from batchmla.parallel import Par


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What a rank must know to be built. Picklable: it is how the other ranks are told.

    `device_index` of its GPU, where that is not its rank.
    """

    config: EngineConfig
    folder: Path
    raw_config: Mapping[str, Any]
    device_index: int | None = None

    def of_rank(self, rank: int) -> "RankPlan":
        """The same for another rank."""
        placement = replace(self.config.placement, rank=rank)
        return replace(self, config=replace(self.config, placement=placement))

    @property
    def device(self) -> torch.device:
        """The rank's own where there are several."""
        config, index = self.config, self.device_index
        if config.device == "cuda" and config.placement.num_ranks > 1:
            return torch.device("cuda", config.placement.rank if index is None else index)
        return torch.device(config.device)


def build_forward(plan: RankPlan, par: Par) -> Forward:
    """Loads the rank's share of the weights and allocates its cache; raises `DeviceError` where
    they do not fit."""
    config = plan.config
    model = _load(plan, par)
    return Forward(
        model,
        config.layout,
        config.num_pages,
        config.limits.num_lanes,
        plan.device,
        is_exact=config.deterministic,
        par=par,
        dtype=getattr(torch, config.dtype),
        vocab_size=get_family(plan.raw_config).Config.from_hf(plan.raw_config).vocab_size,
        recorder=CudaRecorder() if _is_recorded(config, model) else None,
        max_model_len=config.max_model_len,
    )


def _load(plan: RankPlan, par: Par) -> Model:
    config = plan.config
    try:
        return load_model(
            plan.folder,
            plan.raw_config,
            config.placement,
            par,
            kernels.load(config.backend, exact=config.deterministic),
            getattr(torch, config.dtype),
            plan.device,
            config.load_format,
            keeps_quantised=config.keeps_quantised,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            f"memory ran out while the weights of {plan.folder} were loaded; free some, or spread "
            "the model by model.parallel over more devices"
        ) from error


def _is_recorded(config: EngineConfig, model: Model) -> bool:
    """Whether decode steps are replayed: on one GPU, where all tables of a step are on it."""
    is_alone = config.placement.num_ranks == 1
    is_on_device = config.device == "cuda" and config.backend == "triton"
    return is_alone and is_on_device and getattr(model, "can_record", False)
