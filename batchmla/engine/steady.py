"""What a placement generates a second in the middle of a job: the roofline of one mean step.

Every step generates one token for each running row and computes as many prompt tokens as keep them
coming. How many rows run is a matter of the KV pool.
"""

from dataclasses import dataclass

from batchmla.engine.config import EngineConfig
from batchmla.engine.costs import StepCosts, StepWork
from batchmla.engine.exchange import Exchange
from batchmla.engine.hardware import Hardware
from batchmla.engine.network import exchange_seconds
from batchmla.engine.roofline import Rates

LAYER_S = 20e-6  # assumed: launching what a layer runs on a GPU, besides the work itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The rows of a job on average, in tokens."""

    prompt_tokens: float
    output_tokens: float

    def within(self, max_model_len: int) -> "Mix":
        """The same shape, short enough for a context."""
        share = min(1.0, max_model_len / (self.prompt_tokens + self.output_tokens))
        return Mix(
            prompt_tokens=self.prompt_tokens * share, output_tokens=self.output_tokens * share
        )


TYPICAL = Mix(prompt_tokens=1024, output_tokens=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """`rows` run at once in all groups together; `exchange_s` is a part of `step_s`."""

    rows: float
    step_s: float
    exchange_s: float
    tokens_per_s: float


def steady(
    config: EngineConfig, costs: StepCosts, exchange: Exchange, hardware: Hardware, mix: Mix
) -> Steady | None:
    """None where the hardware's rates are not known, or nothing fits."""
    flops, read = hardware.bf16_flops_per_s, hardware.bandwidth_bytes_per_s
    if flops is None or read is None or config.misfit is not None:
        return None
    placement, mix = config.placement, mix.within(config.max_model_len)
    groups, ranks = placement.attention_data, placement.num_ranks
    held = mix.prompt_tokens + mix.output_tokens / 2
    prompts_a_row = mix.prompt_tokens / mix.output_tokens
    rows = min(
        config.max_num_seqs,
        config.num_pages * config.layout.page_tokens / held,
        config.max_batched_tokens / (1 + prompts_a_row),
    )
    prompt_tokens = rows * prompts_a_row
    sampled = rows * (1 + 1 / mix.output_tokens)
    work = StepWork(
        tokens=round(groups * (rows + prompt_tokens)),
        sampled=round(groups * sampled),
        prompt_pairs=round(groups * prompt_tokens * mix.prompt_tokens / 2),
        decode_pairs=round(groups * rows * held),
        kv_tokens=round(groups * rows * held),
    )
    rates = Rates(flops_per_s=flops * ranks, bytes_per_s=read * ranks)
    exchange_s = exchange_seconds(exchange, placement, rows + prompt_tokens, sampled, hardware)
    step_s = costs.serial_step_s(work, rates) + exchange_s + LAYER_S * exchange.num_layers
    return Steady(
        rows=groups * rows,
        step_s=step_s,
        exchange_s=exchange_s,
        tokens_per_s=groups * rows / step_s,
    )
