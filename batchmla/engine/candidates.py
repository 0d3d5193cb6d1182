"""Every placement of a model on the devices that are there, what it holds and what it would do; and
the choice that `model.parallel: auto` makes of them. Arithmetic alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchmla import kernels
from batchmla.core import EngineOptions
from batchmla.engine.config import EngineConfig
from batchmla.engine.drafts import draft_placed, engine_costs
from batchmla.engine.exchange import exchange_of
from batchmla.engine.hardware import Hardware
from batchmla.engine.settle import settle_backend
from batchmla.engine.steady import TYPICAL, Mix, Steady, steady
from batchmla.errors import JobError
from batchmla.placement import Placement

ALIKE = 0.99  # rates this near to the best one are as good


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A placement; `config` is None where the model cannot be cut like that, as `misfit` says."""

    placement: Placement
    config: EngineConfig | None
    misfit: str | None
    steady: Steady | None

    @property
    def fits(self) -> bool:
        return self.misfit is None

    def to_json(self) -> dict[str, Any]:
        """Plain values: sizes of one device in bytes, the rest of all groups together."""
        placement, config, rates = self.placement, self.config, self.steady
        found: dict[str, Any] = {
            "tensor": placement.tensor,
            "expert": placement.expert,
            "attention_data": placement.attention_data,
            "devices": placement.num_ranks,
            "fits": self.fits,
            "misfit": self.misfit,
        }
        if config is None:
            return found
        return found | {
            "weights_bytes": config.memory.weights_bytes,
            "workspace_bytes": config.memory.workspace_bytes,
            "driver_bytes": config.memory.driver_bytes,
            "kv_pool_bytes": config.kv_pool_bytes,
            "kv_capacity_tokens": config.kv_capacity_tokens,
            "max_model_len": config.max_model_len,
            "rows_at_once": None if rates is None else round(rates.rows, 1),
            "step_seconds": None if rates is None else rates.step_s,
            "exchange_seconds": None if rates is None else rates.exchange_s,
            "tokens_per_second": None if rates is None else round(rates.tokens_per_s, 1),
        }


def placements(num_devices: int, *, has_experts: bool) -> Iterator[Placement]:
    """One device, and every way to use all of them."""
    yield Placement()
    for tensor in range(num_devices, 0, -1):
        if num_devices % tensor or num_devices == 1:
            continue
        groups = num_devices // tensor
        sizes = {1, tensor, groups, num_devices} if has_experts else {1}
        for expert in sorted(sizes):
            yield Placement(tensor=tensor, expert=expert, attention_data=groups)


def candidates(
    raw_config: Mapping[str, Any],
    options: EngineOptions,
    hardware: Hardware,
    mix: Mix = TYPICAL,
) -> tuple[Candidate, ...]:
    """In the order of `placements`; of a processor only the one rank."""
    ops = kernels.load_counting(settle_backend(options, hardware))
    exchange = exchange_of(raw_config, ops, itemsize=2)
    num_devices = 1 if hardware.kind == "cpu" else hardware.count
    found = []
    for placement in placements(num_devices, has_experts=exchange.num_expert_layers > 0):
        sizes = {
            "tensor_parallel": placement.tensor,
            "expert_parallel": placement.expert,
            "attention_data": placement.attention_data,
        }
        placed = replace(options, is_parallel_auto=False, **sizes)  # type: ignore[arg-type]
        try:
            config = draft_placed(raw_config, placed, hardware)
        except JobError as error:
            misfit = str(error)
            found.append(Candidate(placement=placement, config=None, misfit=misfit, steady=None))
            continue
        rates = None
        if config.misfit is None and hardware.bf16_flops_per_s is not None:
            costs = engine_costs(raw_config, config)
            rates = steady(config, costs, exchange, hardware, mix)
        found.append(
            Candidate(placement=placement, config=config, misfit=config.misfit, steady=rates)
        )
    return tuple(found)


def best_of(found: tuple[Candidate, ...]) -> Candidate | None:
    """The most tokens a second, where that is told, else the most room; of those alike the one with
    the fewest devices, then the largest pool. None where nothing fits.
    """
    fitting = [each for each in found if each.fits and each.config is not None]
    if not fitting:
        return None
    rates = [0.0 if each.steady is None else each.steady.tokens_per_s for each in fitting]
    best = max(rates)
    alike = [each for each, rate in zip(fitting, rates, strict=True) if rate >= ALIKE * best]
    return min(alike, key=_preference)


def _preference(candidate: Candidate) -> tuple[int, int, int]:
    assert candidate.config is not None
    rate = 0.0 if candidate.steady is None else candidate.steady.tokens_per_s
    return candidate.placement.num_ranks, -candidate.config.kv_capacity_tokens, -round(rate)


def asks_to_choose(options: EngineOptions, hardware: Hardware) -> bool:
    """Whether the placement is left open: by `auto`, or for a machine that is only planned for."""
    sizes = (options.tensor_parallel, options.expert_parallel, options.attention_data)
    is_planned = not hardware.is_local and hardware.count > 1
    return options.is_parallel_auto or (is_planned and sizes == (1, 1, 1))


def settle_parallel(
    raw_config: Mapping[str, Any], options: EngineOptions, hardware: Hardware
) -> EngineOptions:
    """With the sizes named. Where nothing fits, those that leave a device the fewest weights."""
    if not asks_to_choose(options, hardware):
        return options
    options = replace(options, is_parallel_auto=False)
    if hardware.kind == "cpu" or hardware.count == 1:
        return options
    found = candidates(raw_config, options, hardware)
    best = best_of(found)
    if best is None:
        cut = [each for each in found if each.config is not None]
        if not cut:
            return options
        best = min(cut, key=_weights_bytes)
    return replace(
        options,
        tensor_parallel=best.placement.tensor,
        expert_parallel=best.placement.expert,
        attention_data=best.placement.attention_data,
    )


def _weights_bytes(candidate: Candidate) -> int:
    assert candidate.config is not None
    return candidate.config.memory.weights_bytes
