"""The end of a job: when its last rows should run longest first, so that none of them runs alone.

So many of the last rows are sorted as fill all places for as long as the longest one takes. That is
settled when the end is near, with the lengths that have been learned by then.
"""

from collections.abc import Sequence


def drain_rows(output_tokens: Sequence[int], places: int) -> int:
    """How many of the last of these rows, in the order in which they run, keep `places` rows busy
    until the longest of all could have ended.
    """
    wanted_tokens = places * max(output_tokens, default=0)
    tokens = 0
    for count, length in enumerate(reversed(output_tokens), 1):
        tokens += length
        if tokens >= wanted_tokens:
            return count
    return len(output_tokens)


def longest_first(output_tokens: Sequence[int]) -> list[int]:
    """Positions in the order of length. Those within one doubling stay in theirs, so that rows of a
    prefix stay together as far as can be.
    """
    doublings = [length.bit_length() for length in output_tokens]
    return sorted(range(len(doublings)), key=doublings.__getitem__, reverse=True)


class Drain:
    """Tells when the rest of the packed rows is to be sorted. Looks seldom: whenever as few are
    left as it said the last time, or half as many.
    """

    def __init__(self) -> None:
        self._most_asked = 0
        self._places = 0
        self._look_at = 0  # when so many are left

    def asked(self, limit: int, num_taken: int) -> None:
        """The engine asks for so many prompts, with `num_taken` of them not finished. It has no
        more places than the most ever asked, nor more than it wants to have in use now.
        """
        self._most_asked = max(self._most_asked, limit)
        self._places = min(self._most_asked, num_taken + limit)

    def packed(self, num_rows: int) -> None:
        """So many rows have been packed; at most the second half of them is sorted."""
        self._look_at = num_rows // 2

    def may_be_due(self, num_left: int) -> bool:
        """Whether it is worth telling the lengths."""
        return 0 < num_left <= self._look_at

    def is_due(self, output_tokens: Sequence[int]) -> bool:
        """Whether the rows that are left, of these lengths, are to be sorted; once."""
        num_left = len(output_tokens)
        rows = drain_rows(output_tokens, self._places) + self._places  # as many are taken at once
        self._look_at = 0 if num_left <= rows else max(rows, num_left // 2)
        return num_left <= rows
