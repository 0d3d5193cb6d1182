"""The pace of an engine's prompts on its device, from the model's costs and the device's rates."""

import logging
from collections.abc import Mapping
from typing import Any

from batchmla.engine.config import EngineConfig
from batchmla.engine.drafts import engine_costs
from batchmla.engine.hardware import Hardware
from batchmla.engine.pace import Pace

logger = logging.getLogger(__name__)


def device_pace(
    raw_config: Mapping[str, Any], config: EngineConfig, hardware: Hardware
) -> Pace | None:
    """Of a GPU with known rates, which multiplies while it reads weights.

    None on processors, whose cores read or multiply: there prompts take what a step has left, which
    makes the fewest steps.
    """
    flops_per_s, bytes_per_s = hardware.bf16_flops_per_s, hardware.bandwidth_bytes_per_s
    if config.device == "cpu" or flops_per_s is None or bytes_per_s is None:
        return None
    pace = Pace(
        costs=engine_costs(raw_config, config),
        flops_per_byte=flops_per_s / bytes_per_s,
        least_tokens=config.layout.page_tokens,
        groups=config.placement.attention_data,
    )
    logger.info(
        "prompts are paced: up to %d tokens in a step without completions, of %d that fit",
        pace.prompt_tokens(0, 0),
        config.max_batched_tokens,
    )
    return pace
