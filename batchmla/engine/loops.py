"""Whether a reasoning runs in circles: one block of tokens several times in succession.

For every period p up to `LONGEST` it counts how many tokens in succession equal the one p places
before. A block of p tokens stands n times at the end once that count has reached (n - 1) * p.
"""

import numpy as np
import numpy.typing as npt

LONGEST = 1024  # tokens of a block


class LoopWatch:
    """Follows one reasoning, token by token."""

    def __init__(self, num_repeats: int) -> None:
        assert num_repeats >= 2, f"a block that stands {num_repeats} times is no loop"
        self._needed: npt.NDArray[np.int64] = (num_repeats - 1) * np.arange(1, LONGEST + 1)
        self._equal = np.zeros(LONGEST, np.int64)  # at [p - 1], for period p
        self._ids = np.empty(4 * LONGEST, np.int64)
        self._num_ids = 0
        self.has_looped = False

    @property
    def may_loop_next(self) -> bool:
        """Whether one more token could complete a loop."""
        reach = min(self._num_ids, LONGEST)
        return bool((self._equal[:reach] + 1 >= self._needed[:reach]).any())

    def push(self, token_id: int) -> None:
        """Notes a token; `has_looped` tells."""
        if self._num_ids == len(self._ids):
            self._ids[:LONGEST] = self._ids[-LONGEST:]
            self._num_ids = LONGEST
        reach = min(self._num_ids, LONGEST)
        before = self._ids[self._num_ids - reach : self._num_ids][::-1]
        equal = self._equal[:reach]
        np.multiply(equal + 1, before == token_id, out=equal)
        self._ids[self._num_ids] = token_id
        self._num_ids += 1
        if bool((equal >= self._needed[:reach]).any()):
            self.has_looped = True
