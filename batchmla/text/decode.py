"""Token ids back into text, byte for byte, by the decoder that tokenizer.json names.

Bytes are joined before they become characters, so a character split over tokens is whole again and
nothing is stripped. Known are byte-level vocabularies and those with `▁` for a space and `<0x0A>`
for a byte (SentencePiece); others are refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from batchmla.core import TokenIds
from batchmla.errors import JobError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Decoded:
    """`is_lossy`: bytes that are no UTF-8 became U+FFFD. A U+FFFD of the data is not lossy."""

    text: str
    is_lossy: bool


def as_text(data: bytes) -> Decoded:
    """`data` as UTF-8; each broken sequence becomes one U+FFFD."""
    try:
        return Decoded(data.decode(), False)
    except UnicodeDecodeError:
        return Decoded(data.decode(errors="replace"), True)


class Decoder:
    """The bytes of every token id."""

    def __init__(
        self,
        spec: Mapping[str, Any] | None,
        token_of: Callable[[int], str | None],
        id_of: Callable[[str], int | None],
        added: Mapping[int, str],
    ) -> None:
        """`spec`: tokenizer.json's "decoder". `token_of`, `id_of`: the vocabulary."""
        self._model_bytes = _reader(spec)
        self._token_of = token_of
        self._id_of = id_of
        self._bytes = {token_id: content.encode() for token_id, content in added.items()}

    @cached_property
    def is_complete(self) -> bool:
        """Whether the vocabulary has every byte that UTF-8 uses, so that no text is lost in it."""
        if self._model_bytes is not _byte_level:
            return False
        return all(
            self._id_of(character) is not None
            for character, byte in _ALPHABET.items()
            if byte < 0xF5 and byte not in (0xC0, 0xC1)
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; an id that the vocabulary lacks stands for nothing."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._token_of(token_id)
            known = b"" if token is None else self._model_bytes(token)
            self._bytes[token_id] = known
        return known

    def bytes_of(self, ids: TokenIds | Sequence[int]) -> bytes:
        """The bytes of all ids, joined."""
        return b"".join(map(self.token_bytes, map(int, ids)))

    def decode(self, ids: TokenIds | Sequence[int]) -> Decoded:
        """The text of `ids`, control tokens included."""
        return as_text(self.bytes_of(ids))


def _reader(spec: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    parts = [spec] if spec is not None else []
    if spec is not None and spec.get("type") == "Sequence":
        parts = list(spec.get("decoders", ()))
    kinds = [str(part.get("type")) for part in parts]
    unknown = set(kinds) - {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}
    if not kinds or unknown:
        named = ", ".join(sorted(unknown)) or "none"
        raise JobError(
            f"tokenizer.json: its decoder ({named}) cannot be undone exactly; models need a "
            "byte-level or SentencePiece tokenizer"
        )
    if "ByteLevel" in kinds:
        return _byte_level
    replacements: list[tuple[str, str]] = []
    for part in parts:
        if part["type"] == "Metaspace":
            replacements.append((str(part.get("replacement", "▁")), " "))
        elif part["type"] == "Replace":
            pattern = part["pattern"]
            if "String" not in pattern:
                raise JobError(
                    "tokenizer.json: its decoder replaces by a regex, which is not built"
                )
            replacements.append((str(pattern["String"]), str(part["content"])))
    has_bytes = "ByteFallback" in kinds

    def read(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if has_bytes else None
        if byte is not None:
            return bytes([int(byte.group(1), 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return read


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()
