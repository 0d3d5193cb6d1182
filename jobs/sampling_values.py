"""Which value a sampling field may take, whoever gives it: the job, the model, or a row."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from batchmla.core import SamplingParams
from batchmla.jobs.structured import read_structured

if TYPE_CHECKING:
    from batchmla.jobs.sampling_rules import RuleMaker


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


def _whole(least: int, most: int | None = None) -> NumberRule:
    """Whole numbers from `least` on."""
    words = f"a whole number, {least} or more"
    if most is not None:
        words = f"a whole number from {least} to {most}"
    return NumberRule(
        least, lambda v: v >= least and v == int(v) and (most is None or v <= most), words
    )


# of fields that generation_config.json knows, too
MODEL_RULES: Mapping[str, NumberRule] = {
    "temperature": NumberRule(1.0, lambda v: v >= 0, "0 or more"),
    "top_p": NumberRule(1.0, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "top_k": _whole(0),
    "min_p": NumberRule(0.0, lambda v: 0 <= v <= 1, "from 0 to 1"),
    "repetition_penalty": NumberRule(1.0, lambda v: v > 0, "above 0"),
}
MOST_LIKELY = 100  # log-probabilities beside each token's own
MOST_BIAS = 100.0
_PENALTY = NumberRule(0.0, lambda v: -2 <= v <= 2, "from -2 to 2")
_BIAS = NumberRule(0.0, lambda v: -MOST_BIAS <= v <= MOST_BIAS, "from -100 to 100")
_JOB_RULES = {
    "max_tokens": _whole(1),
    "min_tokens": _whole(0),
    "seed": NumberRule(
        0, lambda v: -(2**63) <= v < 2**64 and v == int(v), "a whole number of 64 bits"
    ),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "logprobs": _whole(0, MOST_LIKELY),
    "prompt_logprobs": _whole(0, MOST_LIKELY),
}
JOB_FIELDS = (
    *_JOB_RULES, "stop_token_ids", "ignore_eos", "logit_bias", "bad_words", "stop", "structured",
)  # fmt: skip
# what a request of an OpenAI batch may give under these names
ROW_FIELDS = (
    *MODEL_RULES, "max_tokens", "min_tokens", "seed", "stop_token_ids", "ignore_eos",
    "frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "stop",
)  # fmt: skip


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
    if name in ("stop", "bad_words"):
        return _texts(where, value)
    if name == "logit_bias":
        return _biases(where, value, vocab_limit)
    if name == "structured":
        try:
            return read_structured(value)
        except ValueError as fault:
            raise BadValue(f"{where}: {fault}") from None
    return {**MODEL_RULES, **_JOB_RULES}[name].read(where, value)


def _token_ids(where: str, value: Any, vocab_limit: int | None) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(one) is not int for one in value):
        raise BadValue(f"{where}: {value!r:.60} is out of range; it must be a list of token ids")
    for token_id in sorted(value):
        _check_id(where, token_id, vocab_limit)
    return tuple(value)


def _check_id(where: str, token_id: int, vocab_limit: int | None) -> None:
    if token_id < 0 or (vocab_limit is not None and token_id >= vocab_limit):
        ends = "" if vocab_limit is None else f"; its ids end at {vocab_limit - 1}"
        raise BadValue(f"{where}: {token_id} is no token of the model{ends}")


def _texts(where: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    is_list = isinstance(texts, Sequence)
    if not is_list or any(not isinstance(one, str) or not one for one in texts):
        raise BadValue(f"{where}: {value!r:.60}: it must be a list of texts that are not empty")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadValue(f"{where}: {text!a:.60} holds half a character") from None
    return tuple(texts)


def _biases(where: str, value: Any, vocab_limit: int | None) -> tuple[tuple[int, float], ...]:
    """Of {token id: bias}; ids may be text, as JSON has them, and pairs those of an Arrow map."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    is_list = isinstance(pairs, list | tuple)
    if not is_list or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise BadValue(f"{where}: {value!r:.60}: it must be a map from token ids to biases")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        if bias is None:
            continue  # an id of other rows
        is_id = type(key) is int or (isinstance(key, str) and key.isdecimal() and key.isascii())
        if not is_id:
            raise BadValue(f"{where}: {key!r:.60} is no token id")
        _check_id(where, int(key), vocab_limit)
        biases[int(key)] = _BIAS.read(f"{where}: {key}", bias)
    return tuple(sorted(biases.items()))


def make_params(
    values: Mapping[str, Any],
    eos_ids: frozenset[int],
    vocab_limit: int | None,
    rules: "RuleMaker | None" = None,
) -> SamplingParams:
    """The parameters of checked values, by field. Raises BadValue where they contradict.

    `rules` makes what is about text; without it such values are not looked at.
    """
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
    try:
        grammar = None if rules is None else rules.grammar(values["structured"])
    except ValueError as fault:
        raise BadValue(f"sampling.structured.{fault}") from None
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=values["top_k"],
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
        frequency_penalty=values["frequency_penalty"],
        presence_penalty=values["presence_penalty"],
        logit_bias=values["logit_bias"],
        bans=None if rules is None else rules.bans(values["bad_words"]),
        stop_ids=stop_ids if values["ignore_eos"] else stop_ids | eos_ids,
        stop=None if rules is None else rules.stop(values["stop"]),
        grammar=grammar,
        logprobs=values["logprobs"],
        prompt_logprobs=values["prompt_logprobs"],
    )
