"""What an engine would be, from a parsed `config.json`: no weights, nothing allocated."""

from collections.abc import Mapping
from typing import Any

import torch

from batchmla import kernels
from batchmla.core import EngineOptions
from batchmla.engine.config import EngineConfig, LayoutOf, draft
from batchmla.engine.costs import StepCosts, step_costs
from batchmla.engine.hardware import Hardware
from batchmla.engine.routed import RoutedRows, routed_rows
from batchmla.engine.settle import (
    settle_backend,
    settle_dtype,
    settle_exact,
    settle_placement,
    settle_quantised,
)
from batchmla.errors import JobError
from batchmla.kv.layout import DTYPE_BYTES, KVLayout
from batchmla.models import get_family
from batchmla.models.base import ModelConfig
from batchmla.models.load import count_model
from batchmla.placement import Placement

Facts = tuple[EngineOptions, ModelConfig, LayoutOf, Hardware, int, RoutedRows | None]


def engine_facts(
    raw_config: Mapping[str, Any], options: EngineOptions, hardware: Hardware
) -> Facts:
    """What `draft` and `resolve` take, for the placement that the options name."""
    family = get_family(raw_config)
    config: ModelConfig = family.Config.from_hf(raw_config)

    def layout_of(kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
        formats = getattr(family, "KV_FORMATS", ())
        if kv_dtype not in DTYPE_BYTES and kv_dtype not in formats:
            raise JobError(
                f"model.kv_cache_dtype {kv_dtype} is not built yet for "
                f"{raw_config['architectures'][0]}; leave it at auto"
            )
        return family.layout(config, kv_dtype, placement, page_tokens)

    placement = settle_placement(options, hardware)
    dtype = getattr(torch, settle_dtype(options, config, hardware))
    is_exact = settle_exact(options, hardware)
    ops = kernels.load_counting(settle_backend(options, hardware), exact=is_exact)
    keeps = settle_quantised(options, config)
    count = count_model(raw_config, placement, ops, dtype, keeps_quantised=keeps)
    routed = routed_rows(raw_config, placement, ops)
    return options, config, layout_of, hardware, count.weights_bytes, routed


def draft_placed(
    raw_config: Mapping[str, Any], options: EngineOptions, hardware: Hardware
) -> EngineConfig:
    """The engine in the placement that the options name, fitting or not."""
    return draft(*engine_facts(raw_config, options, hardware))


def engine_costs(raw_config: Mapping[str, Any], config: EngineConfig) -> StepCosts:
    """What a step costs on all devices of an engine together."""
    return step_costs(
        raw_config,
        kernels.load_counting(config.backend),
        config.layout,
        dtype=config.dtype,
        placement=config.placement,
        rank_weight_bytes=config.memory.weights_bytes,
    )
