"""One input row on its way to a prompt."""

from collections.abc import Mapping, Sequence
from itertools import count, repeat
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A row of the input. Its identity is (file, number); `index` counts over all files in order.

    With several samples a row comes as often, and `index` counts all of them.

    `typed_id` keeps 7 and "7" apart where `id` shows both as text. A row that could not be read has
    `error` set and no values.
    """

    index: int  # type: ignore[assignment]
    file: int
    number: int  # 0-based within its file
    id: str
    typed_id: str | int
    values: Mapping[str, Any]
    error: str | None = None
    sample: int = 0


def make_rows(
    index: int,
    file: int,
    number: int,
    ids: Sequence[str | int],
    names: Sequence[str],
    columns: Sequence[Sequence[Any]],
) -> list[Row]:
    """Sound rows of one file in succession, the first one `index` and `number`."""
    values: Any = ({} for _ in ids)
    if columns:
        values = map(dict, map(zip, repeat(names), zip(*columns, strict=True)))
    return list(map(Row, count(index), repeat(file), count(number), map(str, ids), ids, values))
