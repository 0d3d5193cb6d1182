"""The sampling values of a job: its own, else generation_config.json's, else neutral ones.

Every value is kept with its source, for the plan and the manifest.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchmla.core import SamplingParams
from batchmla.errors import JobError
from batchmla.jobs.settings import SamplingSettings

Source = Literal["job", "generation_config", "default"]

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and where it came from."""

    value: Any
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What all rows of a job share. `sources` has every value by its name in the job file."""

    params: SamplingParams
    seed: int
    sources: Mapping[str, Sourced]


@dataclass(frozen=True, slots=True)
class _Rule:
    """The neutral value of a sampling field, and which numbers it may take."""

    neutral: float
    allows: Callable[[float], bool]
    range: str


_RULES = {
    "temperature": _Rule(1.0, lambda v: v >= 0, "0 or more"),
    "top_p": _Rule(1.0, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "top_k": _Rule(0, lambda v: v >= 0 and v == int(v), "a whole number, 0 or more"),
    "min_p": _Rule(0.0, lambda v: 0 <= v <= 1, "from 0 to 1"),
    "repetition_penalty": _Rule(1.0, lambda v: v > 0, "above 0"),
}


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The content of a model folder's generation_config.json, {} without one."""
    file = Path(folder) / _FILE
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as fault:
        raise JobError(f"{file} is not JSON: {fault}") from None
    if not isinstance(content, dict):
        raise JobError(f"{file} must hold a JSON object")
    return content


def resolve_sampling(
    settings: SamplingSettings,
    generation_config: Mapping[str, Any],
    *,
    eos_ids: Iterable[int] = (),
    vocab_limit: int | None = None,
) -> Sampling:
    """The values of a job in force.

    `eos_ids` are what the tokenizer and config.json name as end of text; those of the generation
    config are added. `vocab_limit`: one more than the highest token id.
    """
    sources = {name: _resolve(name, settings, generation_config) for name in _RULES}
    for name in ("max_tokens", "min_tokens", "seed", "stop_token_ids", "ignore_eos"):
        is_given = name in settings.model_fields_set
        sources[name] = Sourced(getattr(settings, name), "job" if is_given else "default")
    listed = _id_list(generation_config.get("eos_token_id"))
    eos = frozenset(eos_ids) | listed
    sources["eos_token_ids"] = Sourced(
        tuple(sorted(eos)), "generation_config" if listed else "default"
    )
    max_tokens, min_tokens = settings.max_tokens, settings.min_tokens
    if max_tokens is not None and max_tokens < 1:
        raise JobError(f"sampling.max_tokens: {max_tokens} is out of range; it must be 1 or more")
    if min_tokens < 0 or (max_tokens is not None and min_tokens > max_tokens):
        raise JobError(
            f"sampling.min_tokens: {min_tokens} is out of range; it must be from 0 to "
            "sampling.max_tokens"
        )
    stop_ids = frozenset(settings.stop_token_ids)
    beyond = sorted(i for i in stop_ids if i < 0 or (vocab_limit is not None and i >= vocab_limit))
    if beyond:
        raise JobError(
            f"sampling.stop_token_ids: {beyond[0]} is no token of the model; its ids end at "
            f"{(vocab_limit or 0) - 1}"
        )
    if min_tokens > 0 and vocab_limit is not None and len(stop_ids | eos) >= vocab_limit:
        raise JobError(
            "sampling.stop_token_ids: they are all tokens of the model, so none is left to draw "
            f"before sampling.min_tokens {min_tokens}; take some out"
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=float(sources["temperature"].value),
        top_p=float(sources["top_p"].value),
        top_k=int(sources["top_k"].value),
        min_p=float(sources["min_p"].value),
        repetition_penalty=float(sources["repetition_penalty"].value),
        stop_ids=stop_ids if settings.ignore_eos else stop_ids | eos,
    )
    return Sampling(params=params, seed=settings.seed, sources=sources)


def _resolve(name: str, settings: SamplingSettings, config: Mapping[str, Any]) -> Sourced:
    rule = _RULES[name]
    value: Any = getattr(settings, name)
    if value is not None:
        return Sourced(_checked(f"sampling.{name}", value, rule), "job")
    if name == "temperature" and config.get("do_sample") is False:
        return Sourced(0.0, "generation_config")
    value = config.get(name)
    if value is None:
        return Sourced(rule.neutral, "default")
    return Sourced(_checked(f"{_FILE}: {name}", value, rule), "generation_config")


def _checked(field: str, value: Any, rule: _Rule) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not rule.allows(value):
        raise JobError(f"{field}: {value!r} is out of range; it must be {rule.range}")
    return float(value) if isinstance(rule.neutral, float) else int(value)


def _id_list(value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise JobError(f"{_FILE}: eos_token_id: {value!r} must be a token id or a list of them")
    return frozenset(ids)
