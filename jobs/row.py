"""One input row on its way to a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the input. Its identity is (file, number); `index` counts over all files in order.

    With several samples a row comes as often, and `index` counts all of them.

    `typed_id` keeps 7 and "7" apart where `id` shows both as text. A row that could not be read has
    `error` set and no values.
    """

    index: int
    file: int
    number: int  # 0-based within its file
    id: str
    typed_id: str | int
    values: Mapping[str, Any]
    error: str | None = None
    sample: int = 0
