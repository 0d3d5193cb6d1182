"""A model folder's tokenizer: text to ids with row text kept apart from control tokens, and back.

Ids equal those of transformers' AutoTokenizer. The library `tokenizers` reads tokenizer.json
itself, because importing transformers takes seconds; transformers is asked only where that file is
missing and has to be made from an older format.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from batchmla.core import TokenIds
from batchmla.errors import JobError
from batchmla.text.control import AddedToken, ControlStrings, Match
from batchmla.text.decode import Decoded, Decoder
from batchmla.text.marked import MarkedText
from batchmla.text.tokenizer_files import (
    add_missing,
    added_tokens,
    converted,
    read_json,
    special_tokens,
    unreadable,
)


class Tokenizer:
    """See the module's docstring. Made by `Tokenizer.load`."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        """`config`: the content of tokenizer_config.json, {} without one."""
        backend.no_truncation()
        backend.no_padding()
        self.config = dict(config)
        self.special_tokens = special_tokens(config)
        add_missing(backend, config, self.special_tokens)
        self._full = backend
        added = added_tokens(backend)
        self.control = ControlStrings(added)
        self._added = {token.token_id: token.content for token in added}
        self._texts = [token for token in added if token.is_text]
        self.vocab_limit = max([backend.get_vocab_size() - 1, *self._added]) + 1
        self._is_control = np.zeros(self.vocab_limit, dtype=bool)
        self._is_control[[token.token_id for token in self.control.tokens]] = True
        self._static_ids = lru_cache(maxsize=4096)(self._matched_ids)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a model folder."""
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        for name, value in read_json(folder / "special_tokens_map.json").items():
            config.setdefault(name, value)
        file = folder / "tokenizer.json"
        if not file.is_file():
            return cls(converted(folder), config)
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)), config)
        except JobError:
            raise
        except Exception as fault:  # the library raises bare Exception on a bad file
            raise unreadable(file, f"is not a tokenizer: {fault}") from None

    def __len__(self) -> int:
        """One more than the highest id."""
        return self.vocab_limit

    @property
    def bos_id(self) -> int | None:
        """The id of the begin-of-text token, if the model names one."""
        return self._named_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The id of the end-of-text token, if the model names one."""
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self.id_of(content)

    def id_of(self, token: str) -> int | None:
        """The id of a vocabulary entry by its text."""
        found = self._full.token_to_id(token)
        return None if found is None else int(found)

    def tokens_beyond(self, num_rows: int) -> list[tuple[int, str]]:
        """(id, text) of the tokens that an embedding of so many rows has no row for, by id."""
        return sorted((i, text) for text, i in self._full.get_vocab().items() if i >= num_rows)

    def control_id(self, text: str) -> int | None:
        """The id of the control token with this text, None for ordinary text."""
        return next((t.token_id for t in self.control.tokens if t.content == text), None)

    def is_control(self, ids: TokenIds) -> npt.NDArray[np.bool_]:
        """For every id whether it is a control token."""
        return self._is_control[ids]

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the tokenizer itself puts a BOS before a plain text."""
        if self.bos_id is None:
            return False
        is_told = "add_bos_token" in self.config or "add_eos_token" in self.config
        if is_told or self._full.post_processor is None:
            return bool(self.config.get("add_bos_token", False))
        ids = self._full.encode("a", add_special_tokens=True).ids
        plain = self._full.encode("a", add_special_tokens=False).ids
        return bool(ids[:1] == [self.bos_id] and plain[:1] != ids[:1])

    # Text to ids

    def encode(self, text: MarkedText | str) -> TokenIds:
        """The ids of one text; a plain string counts as template text."""
        return self.encode_batch([text if isinstance(text, MarkedText) else MarkedText(text)])[0]

    def encode_plain(self, text: str) -> TokenIds:
        """The ids of a text in which nothing is a control token."""
        return self.encode(MarkedText.of_row(text))

    def encode_batch(self, texts: Sequence[MarkedText]) -> list[TokenIds]:
        """The ids of every text. Only text outside row spans becomes control tokens.

        The whole text is encoded at once. That is right, and equal to what transformers makes of
        it, whenever the control tokens it yields are those of the template; else the text is cut
        at the template's own and the pieces are encoded with added-token matching off.
        """
        encodings = self._full.encode_batch_fast([t.text for t in texts], add_special_tokens=False)
        encoded: list[TokenIds] = []
        for text, encoding in zip(texts, encodings, strict=True):
            ids = np.asarray(encoding.ids, dtype=np.int32)
            if ids[self._is_control[ids]].tolist() != self._template_ids(text):
                ids = self.encode_pieces(text)
            ids.flags.writeable = False
            encoded.append(ids)
        return encoded

    def _template_ids(self, text: MarkedText) -> list[int]:
        ids: list[int] = []
        for start, end, is_row in text.runs():
            if not is_row:
                run = text.text[start:end]
                ids += self._static_ids(run) if len(run) <= 4096 else self._matched_ids(run)
        return ids

    def _matched_ids(self, text: str) -> tuple[int, ...]:
        return tuple(match.token.token_id for match in self.control.matches(text))

    def encode_pieces(self, text: MarkedText) -> TokenIds:
        """The ids of one text, cut at the template's control strings."""
        ids: list[int] = []
        at = 0
        for match in self._swallowed(text, self.control.in_template(text)):
            ids += self._encode_bare(text.text[at : match.start], is_first=at == 0)
            ids.append(match.token.token_id)
            at = match.end
        ids += self._encode_bare(text.text[at:], is_first=at == 0)
        return np.asarray(ids, dtype=np.int32)

    def _swallowed(self, text: MarkedText, matches: Iterable[Match]) -> list[Match]:
        """The matches with the white space of row text beside them, where a token takes it."""
        grown: list[Match] = []
        at = 0
        for match in matches:
            start, end = match.start, match.end
            if match.token.lstrip:
                kept = text.text[at:start].rstrip()
                start = at + len(kept)
            if match.token.rstrip:
                end = len(text.text) - len(text.text[end:].lstrip())
            grown.append(Match(start, end, match.token))
            at = end
        return grown

    def _encode_bare(self, text: str, *, is_first: bool) -> list[int]:
        if not text:
            return []
        bare = self._bare_first if is_first else self._bare_rest
        encoding = bare.encode(text, add_special_tokens=False)
        ids: list[int] = [self._bare_ids.get(i, i) for i in encoding.ids]
        for token_id, (start, end) in zip(ids, encoding.offsets, strict=True):
            if self._is_control[token_id]:  # an entry of the model's own vocabulary, too
                if end - start < 2:
                    raise ValueError(f"{text[start:end]!r} can only be written as a control token")
                middle = (start + end) // 2
                left = self._encode_bare(text[:middle], is_first=is_first)
                return left + self._encode_bare(text[middle:], is_first=False)
        return ids

    @cached_property
    def _bare_first(self) -> tokenizers.Tokenizer:
        bare = tokenizers.Tokenizer(self._full.model)
        if self._full.normalizer is not None:
            bare.normalizer = self._full.normalizer
        if self._full.pre_tokenizer is not None:
            bare.pre_tokenizer = self._full.pre_tokenizer
        bare.add_tokens([_as_library_token(token) for token in self._texts])
        return bare

    @cached_property
    def _bare_rest(self) -> tokenizers.Tokenizer:
        """For pieces behind the first: a word mark for the start of a text is not set again."""
        spec = json.loads(self._bare_first.to_str()) if self._has_first_mark else None
        if spec is None:
            return self._bare_first
        _replace_first_mark(spec["pre_tokenizer"])
        return tokenizers.Tokenizer.from_str(json.dumps(spec))

    @cached_property
    def _bare_ids(self) -> dict[int, int]:
        pairs = [(self._bare_first.token_to_id(t.content), t.token_id) for t in self._texts]
        return {bare: full for bare, full in pairs if bare is not None and bare != full}

    @cached_property
    def _has_first_mark(self) -> bool:
        pre_tokenizer = self._full.pre_tokenizer
        return pre_tokenizer is not None and b'"first"' in pre_tokenizer.__getstate__()

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of ids of a text, without encoding it; 0 if none is known."""
        if self._most_bytes is None:
            return 0
        return -(-len(text.encode()) // self._most_bytes)

    @cached_property
    def _most_bytes(self) -> int | None:
        """Most bytes of text that one id can stand for, None where text may vanish."""
        normalizer = self._full.normalizer
        kept = {None: 1, "NFC": 4}  # composing shortens UTF-8 to a third at most
        kind = None
        if normalizer is not None:
            spec = json.loads(normalizer.__getstate__())
            kind = None if spec.get("normalizers") == [] else str(spec["type"])
        if kind not in kept or not self.decoder.is_complete:
            return None
        longest = max(len(self.token_bytes(i)) for i in range(self.vocab_limit))
        return longest * kept[kind]

    # Ids to text

    @cached_property
    def decoder(self) -> Decoder:
        """The bytes of every id."""
        decoder = self._full.decoder
        spec = None if decoder is None else json.loads(decoder.__getstate__())
        return Decoder(spec, self._full.id_to_token, self._full.token_to_id, self._added)

    def decode(self, ids: TokenIds | Sequence[int]) -> Decoded:
        """The exact text of `ids`, control tokens included, and whether bytes were replaced."""
        return self.decoder.decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for."""
        return self.decoder.token_bytes(token_id)


def _as_library_token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized,
    )


def _replace_first_mark(spec: Any) -> None:
    if isinstance(spec, dict):
        if spec.get("prepend_scheme") == "first":
            spec["prepend_scheme"] = "never"
        for value in spec.values():
            _replace_first_mark(value)
    elif isinstance(spec, list):
        for value in spec:
            _replace_first_mark(value)
