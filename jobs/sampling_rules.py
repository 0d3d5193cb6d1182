"""Sampling values that are about text, as the rules that the engine follows: stop strings, banned
words, structured output. Each different rule of a job is made once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from batchmla.core import BanRule, Grammar, StopRule
from batchmla.text.bans import BannedWords, Vocabulary
from batchmla.text.grammar import BadGrammar, GrammarCompiler
from batchmla.text.stops import StopStrings
from batchmla.text.tokenizer import Tokenizer

_MOST_KEPT = 256  # rules of rows that bring their own


class RuleMaker:
    """Of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Vocabulary | None = None
        self._compiler: GrammarCompiler | None = None
        self._stops: dict[tuple[str, ...], StopRule] = {}
        self._bans: dict[tuple[str, ...], BanRule] = {}

    def stop(self, texts: Sequence[str]) -> StopRule | None:
        """None without stop strings."""
        key = tuple(texts)
        if key and key not in self._stops:
            _make_room(self._stops)
            self._stops[key] = StopStrings.of(key, self._tokenizer.token_bytes)
        return self._stops[key] if key else None

    def bans(self, words: Sequence[str]) -> BanRule | None:
        """None without banned words."""
        key = tuple(words)
        if key and key not in self._bans:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.of(self._tokenizer)
            _make_room(self._bans)
            self._bans[key] = BannedWords(key, self._vocabulary)
        return self._bans[key] if key else None

    def grammar(self, structured: Mapping[str, Any] | None) -> Grammar | None:
        """None without structured output. Raises BadGrammar."""
        if structured is None:
            return None
        ((kind, value),) = structured.items()
        try:
            return self.compiler.compile(kind, value)
        except BadGrammar as fault:
            raise BadGrammar(f"{kind}: {fault}") from None

    @property
    def compiler(self) -> GrammarCompiler:
        """Made when first asked for. Raises BadGrammar where its library is missing."""
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer)
        return self._compiler


def _make_room(made: dict[Any, Any]) -> None:
    """Drops the rule made first where there are too many."""
    if len(made) >= _MOST_KEPT:
        del made[next(iter(made))]
