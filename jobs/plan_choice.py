"""What `plan` recommends, and why: a placement and the engine's sizes in it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchmla.core import EngineOptions
from batchmla.engine.candidates import Candidate, best_of, candidates
from batchmla.engine.config import EngineConfig
from batchmla.engine.hardware import Hardware
from batchmla.engine.steady import TYPICAL, Mix
from batchmla.jobs.counts import RowCounts

ENOUGH_TOKENS = 4096  # in a step of all groups; with fewer weights are read too often


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Settings for the job file. Sequences and tokens are those of each attention group;
    `driver_bytes` are what each device has in use besides tensors then."""

    tensor: int
    expert: int
    attention_data: int
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    kv_cache_dtype: str
    driver_bytes: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def recommend(
    raw_config: Mapping[str, Any],
    options: EngineOptions,
    hardware: Hardware,
    counts: RowCounts,
) -> tuple[tuple[Candidate, ...], Recommendation | None]:
    """Every placement on this hardware, and the settings of the best; None where nothing fits."""
    found = candidates(raw_config, options, hardware)
    best = best_of(found)
    if best is None or best.config is None:
        return found, None
    config, placement = best.config, best.placement
    return found, Recommendation(
        tensor=placement.tensor,
        expert=placement.expert,
        attention_data=placement.attention_data,
        max_num_seqs=_useful_rows(config, mix_of(counts)),
        max_batched_tokens=config.max_batched_tokens,
        block_size=config.layout.page_tokens,
        kv_cache_dtype=config.kv_dtype,
        driver_bytes=config.memory.driver_bytes,
        reason=_reason(found, best, config),
    )


def mix_of(counts: RowCounts) -> Mix:
    """The job's mean row, or a typical one where tokens are not counted."""
    lengths = counts.lengths
    if lengths is None or not len(lengths.prompt_tokens_R):
        return TYPICAL
    return Mix(
        prompt_tokens=max(1.0, float(lengths.prompt_tokens_R.mean())),
        output_tokens=max(1.0, float(lengths.output_tokens_R.mean())),
    )


def _useful_rows(config: EngineConfig, mix: Mix) -> int:
    """As many as the pool holds of such rows half-way, rounded up to a multiple of eight, within
    the limit of the engine."""
    mix = mix.within(config.max_model_len)
    tokens = config.num_pages * config.layout.page_tokens
    rows = tokens / (mix.prompt_tokens + mix.output_tokens / 2)
    return max(1, min(config.max_num_seqs, 8 * -(-int(rows) // 8)))


def _reason(found: tuple[Candidate, ...], best: Candidate, config: EngineConfig) -> str:
    """One sentence."""
    tokens = f"{config.kv_capacity_tokens:,} tokens of KV cache"
    others = [each for each in found if each is not best and each.fits and each.config is not None]
    if best.placement.num_ranks == 1:
        if config.device == "cpu":
            return f"one rank has all of the processor and room for {tokens}."
        return f"one device holds the model and {tokens}; more would only talk to each other."
    if best.steady is None:
        return f"it has the most room, {tokens}."
    told = f"{tokens} let {best.steady.rows:,.0f} rows of {_typical()} run at once"
    tensor = next((each for each in others if each.placement.attention_data == 1), None)
    if tensor is None or tensor.config is None or tensor.steady is None:
        return f"{told}, more a second than any other placement."
    times = best.steady.tokens_per_s / tensor.steady.tokens_per_s
    return (
        f"{told}, an estimated {times:.1f} times the tokens a second of tensor "
        f"{tensor.placement.tensor}, which holds {tensor.config.kv_capacity_tokens:,}."
    )


def _typical() -> str:
    return f"{TYPICAL.prompt_tokens:.0f} + {TYPICAL.output_tokens:.0f} tokens"


def warnings(config: EngineConfig) -> list[str]:
    """Settings that waste a device."""
    groups = config.placement.attention_data
    if config.device != "cuda" or groups * config.max_batched_tokens >= ENOUGH_TOKENS:
        return []
    of_each = f" in each of {groups} attention groups" if groups > 1 else ""
    return [
        f"engine.max_batched_tokens {config.max_batched_tokens}{of_each} is small for a GPU: "
        "prompts take many steps, each of which reads the weights; set it to "
        f"{-(-ENOUGH_TOKENS // groups)} or more"
    ]
