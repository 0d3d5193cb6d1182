"""Grammars for contents: a JSON schema, a regex, a choice or a Lark grammar as masks over tokens.

The library llguidance computes the masks; it is imported only where a job asks for a grammar. The
tokens are the bytes that our own decoder gives them; control tokens are never part of a content.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from batchmla.core import GrammarState
from batchmla.text.tokenizer import Tokenizer

KINDS = ("json_schema", "regex", "choice", "grammar")
WHITE_SPACE = r"[ \n\r\t]{1,40}"  # between the tokens of JSON; without an end a model may go on
MOST_CUT = 4096  # texts that grammars force, with their tokens
MOST_KEPT = 256  # grammars; rows may bring more, which are compiled again when they are due
_ONES = 0xFFFFFFFF


def grammar_version() -> str:
    """Of the library that computes the masks."""
    try:
        return version("llguidance")
    except PackageNotFoundError:
        return "none"


class BadGrammar(ValueError):
    """No content can follow it, or it cannot be read; the message says why."""


class Content:
    """A `GrammarState`."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._sure_id: int | None = None
        self._is_asked = False  # for `_sure_id`, since the last token

    @property
    def can_end(self) -> bool:
        """Whether the content so far is complete."""
        return bool(self.matcher.is_accepting())

    @property
    def is_over(self) -> bool:
        """Whether nothing can follow."""
        return bool(self.matcher.is_stopped()) and self.fault is None

    @property
    def sure_id(self) -> int | None:
        """The token that the model would write what the grammar forces in: the mask has no other.

        The library may cut a longer text otherwise once its first token is there, so it is asked
        for one token at a time.
        """
        if not self._is_asked:
            self._is_asked = True
            is_open = not self.matcher.is_stopped() and not self.matcher.is_accepting()
            forced: list[int] = self.matcher.compute_ff_tokens() if is_open else []
            self._sure_id = forced[0] if forced else None
        return self._sure_id

    @property
    def fault(self) -> str | None:
        """What the library says of its own failure, such as a limit that was reached."""
        return _sentence(self.matcher.get_error()) if self.matcher.is_error() else None

    def push(self, token_id: int) -> None:
        """Notes a token of the content."""
        self.matcher.consume_token(token_id)  # a failure stays in the matcher
        self._is_asked = False


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A `Grammar`."""

    compiler: "GrammarCompiler"
    text: str  # as the library takes it; what is made of it is the compiler's to keep

    def start(self) -> Content:
        """The state of an empty content."""
        return Content(self.compiler.first(self.text).deep_copy())

    def fill(self, states: Sequence[GrammarState], masks_NW: npt.NDArray[np.int32]) -> None:
        """The masks of all states at once."""
        self.compiler.fill(states, masks_NW)


class GrammarCompiler:
    """Compiles each different grammar of a job once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises BadGrammar where the library is missing."""
        try:
            import llguidance
            import llguidance.numpy
        except ImportError:
            raise BadGrammar(
                'it needs the package llguidance; run pip install "batchmla[structured]"'
            ) from None
        self._library = llguidance
        vocabulary = _Vocabulary(tokenizer)
        self._end_id = vocabulary.eos_token_id
        self._num_words = -(-len(vocabulary.tokens) // 32)
        wrapper = llguidance.TokenizerWrapper(vocabulary)
        self._tokens = llguidance.LLTokenizer(wrapper, n_vocab=len(vocabulary.tokens))
        self._executor = llguidance.LLExecutor()
        self.first = lru_cache(maxsize=MOST_KEPT)(self._first)  # text → matcher at its beginning
        self._checked = lru_cache(maxsize=MOST_KEPT)(self._check)

    def compile(self, kind: str, value: Any) -> CompiledGrammar:
        """The grammar of a JSON schema (a map or true), a regex, a list of choices, or in Lark.

        Raises BadGrammar where it cannot be read or no text at all follows it.
        """
        made = self._checked(kind, json.dumps(value))  # the order of properties counts
        if isinstance(made, str):
            raise BadGrammar(made)
        return made

    def fill(self, states: Sequence[GrammarState], masks_NW: npt.NDArray[np.int32]) -> None:
        """See `Grammar.fill`; uses several processors.

        What is forced is asked for before, so that none of them needs our tokenizer and waits for
        Python.
        """
        matchers = []
        for row, state in enumerate(states):
            assert isinstance(state, Content), "a state of another library"
            _ = state.sure_id
            matchers.append((state.matcher, row))
        filled_NW = np.zeros((len(matchers), self._num_words), np.int32)
        self._library.numpy.fill_next_token_bitmask_par(self._executor, matchers, filled_NW)
        word, bit = divmod(self._end_id, 32)
        filled_NW.view(np.uint32)[:, word] &= np.uint32(_ONES ^ (1 << bit))
        num_words = min(self._num_words, masks_NW.shape[1])
        masks_NW[:, :num_words] = filled_NW[:, :num_words]

    def _check(self, kind: str, value_text: str) -> CompiledGrammar | str:
        """The grammar, or what is wrong with it."""
        try:
            text = self._text(kind, json.loads(value_text))
        except ValueError as fault:
            return _sentence(str(fault))
        message = self._library.LLMatcher.validate_grammar(text, self._tokens)
        if message and not message.startswith("WARNING"):
            return _sentence(message)
        made = CompiledGrammar(self, text)
        begun = made.start()
        if begun.fault is not None:
            return begun.fault
        masks = np.zeros((1, self._num_words), np.int32)
        self.fill([begun], masks)
        return made if masks.any() else "no text follows it"

    def _first(self, text: str) -> Any:
        return self._library.LLMatcher(self._tokens, text, log_level=0)

    def _text(self, kind: str, value: Any) -> str:
        """The grammar as llguidance takes it."""
        library = self._library.LLMatcher
        if kind == "json_schema":
            if value is False:
                raise ValueError("no text follows the schema false")
            schema = {} if value is True else value
            options: Any = {"whitespace_pattern": WHITE_SPACE}
            return str(library.grammar_from_json_schema(json.dumps(schema), overrides=options))
        if kind == "regex":
            return str(library.grammar_from_regex(value))
        if kind == "choice":
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            return str(library.grammar_from_lark(f"start: {choices}"))
        return str(library.grammar_from_lark(value))


class _Vocabulary:
    """The tokens as llguidance's `TokenizerWrapper` wants them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        limit = len(tokenizer)
        is_control = tokenizer.is_control(np.arange(limit, dtype=np.int32))
        self._tokenizer = tokenizer
        self._cut = lru_cache(maxsize=MOST_CUT)(self._cut_anew)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(limit)]
        self.special_token_ids: list[int] = np.flatnonzero(is_control).tolist()
        self.bos_token_id = None
        self.eos_token_id = limit if tokenizer.eos_id is None else tokenizer.eos_id
        if self.eos_token_id == limit:
            self.tokens.append(b"<end>")
            self.special_token_ids.append(limit)

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens that the model writes this text in: what a grammar forces is put in them."""
        return list(self._cut(text if isinstance(text, bytes) else text.encode()))

    def _cut_anew(self, data: bytes) -> list[int]:
        ids = self._tokenizer.encode_plain(data.decode(errors="replace")).tolist()
        if self._tokenizer.decoder.bytes_of(ids) == data:
            return list(ids)
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """For text that the tokenizer changes: the longest token that fits, again and again."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            found = next((end for end in ends if data[at:end] in self._ids), None)
            if found is None:
                return ids  # the rest is left to the model
            ids.append(self._ids[data[at:found]])
            at = found
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        pairs = [(text, n) for n, text in enumerate(self.tokens) if text and n not in special]
        return dict(reversed(pairs))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


def _sentence(message: str) -> str:
    """The library's message on one line, without the dump of its state."""
    return " ".join(message.split("<state>")[0].split())[:300]
