"""The least time in which rows can pass through a model, by the roofline: flops and bytes."""

from batchmla import kernels
from batchmla.bench.rows import Load
from batchmla.engine.config import EngineConfig
from batchmla.engine.costs import StepCosts, step_costs
from batchmla.engine.describe import ModelFacts
from batchmla.engine.hardware import Hardware
from batchmla.engine.roofline import Rates, measure_cpu_rates
from batchmla.kv.layout import DTYPE_BYTES

_DENSE_KINDS = {"gqa", "mla"}  # each token attends to all before it


def rates_of(hardware: Hardware, config: EngineConfig) -> tuple[Rates | None, str]:
    """What the devices in use do a second, and how that is known; None where it is not."""
    if config.device == "cpu":
        return measure_cpu_rates(config.dtype), "rates measured before and after the runs"
    if hardware.bf16_flops_per_s is None or hardware.bandwidth_bytes_per_s is None:
        return None, f"no rates are known of {hardware.name}: no share of the roofline"
    count = config.placement.num_ranks
    rates = Rates(
        flops_per_s=hardware.bf16_flops_per_s * count,
        bytes_per_s=hardware.bandwidth_bytes_per_s * count,
    )
    return rates, "rates of the data sheet"


def costs_of(facts: ModelFacts, config: EngineConfig) -> StepCosts | None:
    """The model's flops and bytes; None where attention is not to all tokens, of which the costs
    know nothing.
    """
    if not set(facts.attention) <= _DENSE_KINDS:
        return None
    stored_bytes = config.memory.weights_bytes * config.placement.num_ranks
    return step_costs(
        facts.raw,
        kernels.load("reference"),
        config.layout,
        dtype=config.dtype,
        weight_scale=stored_bytes / (facts.total_params * DTYPE_BYTES[config.dtype]),
    )


def least_s(costs: StepCosts, rates: Rates, load: Load) -> float:
    """Seconds for a load: the larger of all flops and all bytes, as if every step could hide the
    one behind the other.

    There is one step before the first token, and there are as many after it as the rows need when
    all places are always taken.
    """
    prompt, new, rows = load.prompt_tokens, load.output_tokens, load.rows
    decodes = rows * (new - 1)
    prompt_pairs = rows * prompt * (prompt + 1) / 2
    contexts = decodes * prompt + rows * (new - 1) * new / 2
    flops = costs.linear_flops(rows * prompt + decodes, rows * new)
    flops += costs.attention_flops(prompt_pairs, contexts)
    num_bytes = costs.weight_bytes(prompt) + costs.kv_token_bytes * contexts
    num_bytes += decodes / load.together * costs.weight_bytes(load.together)
    return max(flops / rates.flops_per_s, num_bytes / rates.bytes_per_s)
