"""Prompts that are too long are cut where the job says: in the longest text that came from the row.

The template's own text, and every other text of the row, stay whole.
"""

from collections.abc import Callable
from typing import Literal

from batchmla.text.marked import MarkedText

Side = Literal["truncate_left", "truncate_right", "truncate_middle"]

_MOST_CHARACTERS = 16  # of a token, on the average of a text: more are never tried
_MOST_TRIES = 12


def room_of(limit_tokens: int, max_tokens: int | None) -> int:
    """Tokens that a prompt may keep: the rest is left to the answer.

    That is sampling.max_tokens, or a quarter of the context without it, but half of it at most.
    """
    answer = limit_tokens // 4 if max_tokens is None else max_tokens
    return limit_tokens - max(1, min(answer, limit_tokens // 2))


def shortened(
    text: MarkedText, side: Side, room: int, count: Callable[[MarkedText], int]
) -> MarkedText | None:
    """`text` with no more than `room` tokens by `count`; None if that is not possible.

    As much is kept as a few tries find, to about half a percent of the room.
    """
    if not text.spans:
        return None
    longest = max(text.spans, key=lambda span: span[1] - span[0])
    fixed = count(_kept(text, longest, 0, side))
    if fixed > room:
        return None
    fits, fails = 0, longest[1] - longest[0] + 1
    tries = min(fails - 1, _MOST_CHARACTERS * room)
    for _ in range(_MOST_TRIES):
        found = count(_kept(text, longest, tries, side))
        if found <= room:
            fits = tries
        else:
            fails = tries
        if fails - fits <= 1 or (found <= room and room - found <= room // 200):
            break
        guess = int(tries * (room - fixed) / max(1, found - fixed))
        tries = guess if fits < guess < fails else (fits + fails) // 2
    return _kept(text, longest, fits, side)


def _kept(text: MarkedText, span: tuple[int, int], count: int, side: Side) -> MarkedText:
    """`text` with `count` characters of a span."""
    start, end = span
    head = {"truncate_left": 0, "truncate_right": count, "truncate_middle": -(-count // 2)}[side]
    return MarkedText.join(
        (text.cut(0, start + head), text.cut(end - (count - head), len(text.text)))
    )
