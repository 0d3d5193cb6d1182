"""Which value a sampling field may take, whoever gives it: the job, the model, or a row."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from batchmla.core import SamplingParams


class BadValue(ValueError):
    """A value that its field cannot take; the message names both."""


@dataclass(frozen=True, slots=True)
class NumberRule:
    """The neutral value of a number, and which numbers it may be."""

    neutral: float
    allows: Callable[[float], bool]
    range: str

    def read(self, where: str, value: Any) -> float:
        """The number; a whole one where `neutral` is whole. Raises BadValue."""
        if isinstance(value, Decimal):
            value = float(value) if value % 1 else int(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not self.allows(value):
            raise BadValue(f"{where}: {value!r:.60} is out of range; it must be {self.range}")
        return float(value) if isinstance(self.neutral, float) else int(value)


# of fields that generation_config.json knows, too
MODEL_RULES: Mapping[str, NumberRule] = {
    "temperature": NumberRule(1.0, lambda v: v >= 0, "0 or more"),
    "top_p": NumberRule(1.0, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "top_k": NumberRule(0, lambda v: v >= 0 and v == int(v), "a whole number, 0 or more"),
    "min_p": NumberRule(0.0, lambda v: 0 <= v <= 1, "from 0 to 1"),
    "repetition_penalty": NumberRule(1.0, lambda v: v > 0, "above 0"),
}
_JOB_RULES = {
    "max_tokens": NumberRule(1, lambda v: v >= 1 and v == int(v), "a whole number, 1 or more"),
    "min_tokens": NumberRule(0, lambda v: v >= 0 and v == int(v), "a whole number, 0 or more"),
    "seed": NumberRule(
        0, lambda v: -(2**63) <= v < 2**64 and v == int(v), "a whole number of 64 bits"
    ),
}
ROW_FIELDS = (*MODEL_RULES, *_JOB_RULES, "stop_token_ids", "ignore_eos")


def read_value(name: str, where: str, value: Any, vocab_limit: int | None) -> Any:
    """A value of the field `name` as `make_params` takes it. Raises BadValue.

    `where` says who gave it; `vocab_limit` is one more than the highest token id.
    """
    if name == "ignore_eos":
        if not isinstance(value, bool):
            raise BadValue(f"{where}: {value!r:.60} is out of range; it must be true or false")
        return value
    if name == "stop_token_ids":
        return _token_ids(where, value, vocab_limit)
    return {**MODEL_RULES, **_JOB_RULES}[name].read(where, value)


def _token_ids(where: str, value: Any, vocab_limit: int | None) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(one) is not int for one in value):
        raise BadValue(f"{where}: {value!r:.60} is out of range; it must be a list of token ids")
    beyond = sorted(i for i in value if i < 0 or (vocab_limit is not None and i >= vocab_limit))
    if beyond:
        ends = "" if vocab_limit is None else f"; its ids end at {vocab_limit - 1}"
        raise BadValue(f"{where}: {beyond[0]} is no token of the model{ends}")
    return tuple(value)


def make_params(
    values: Mapping[str, Any], eos_ids: frozenset[int], vocab_limit: int | None
) -> SamplingParams:
    """The parameters of checked values, by field. Raises BadValue where they contradict."""
    max_tokens, min_tokens = values["max_tokens"], values["min_tokens"]
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadValue(
            f"sampling.min_tokens: {min_tokens} is out of range; it must be from 0 to "
            f"sampling.max_tokens, which is {max_tokens}"
        )
    stop_ids = frozenset(values["stop_token_ids"])
    if min_tokens > 0 and vocab_limit is not None and len(stop_ids | eos_ids) >= vocab_limit:
        raise BadValue(
            "sampling.stop_token_ids: they are all tokens of the model, so none is left to draw "
            f"before sampling.min_tokens {min_tokens}; take some out"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=values["top_k"],
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
        stop_ids=stop_ids if values["ignore_eos"] else stop_ids | eos_ids,
    )
