"""Prompts on their way to another process.

Stop strings, banned words and grammars hold tables of the tokenizer: they travel as their texts and
are made again where the engine is, each different one once.
"""

import pickle
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from batchmla.core import Prompt
from batchmla.jobs.sampling_rules import RuleMaker
from batchmla.text.bans import BannedWords
from batchmla.text.grammar import CompiledGrammar
from batchmla.text.stops import StopStrings
from batchmla.text.tokenizer import Tokenizer


class _Writer(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[str, Any] | None:
        if isinstance(value, StopStrings):
            return "stop", value.strings
        if isinstance(value, BannedWords):
            return "bans", value.words
        if isinstance(value, CompiledGrammar):
            return "grammar", value.text
        return None


def write_prompts(prompts: Sequence[Prompt]) -> bytes:
    """For `PromptReader.read` in another process."""
    out = BytesIO()
    _Writer(out, protocol=pickle.HIGHEST_PROTOCOL).dump(list(prompts))
    return out.getvalue()


class PromptReader:
    """Reads what `write_prompts` wrote, for a model with this tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._rules = RuleMaker(tokenizer)

    def read(self, data: bytes) -> list[Prompt]:
        """Only for data of our own making: pickles are programs."""
        prompts: list[Prompt] = _Reader(data, self._rules).load()
        return prompts


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, rules: RuleMaker) -> None:
        super().__init__(BytesIO(data))
        self._rules = rules

    def persistent_load(self, name: tuple[str, Any]) -> Any:
        kind, value = name
        if kind == "stop":
            return self._rules.stop([text.decode() for text in value])
        if kind == "bans":
            return self._rules.bans([word.decode() for word in value])
        assert kind == "grammar", kind
        return CompiledGrammar(self._rules.compiler, value)
