"""The reasoning budget of one sequence: counts generated tokens inside the reasoning, then dictates
the end.
 States: waiting for the opening marker → open → (budget spent) forcing → closed; a complete end
marker written by the model closes it too. Closed is final.
"""

from collections import deque
from enum import Enum, auto

from batchmla.core import Budget


class BudgetState(Enum):
    """Where the sequence stands with respect to its reasoning."""

    WAITING = auto()
    OPEN = auto()
    FORCING = auto()
    CLOSED = auto()


class BudgetWatch:
    """Follows the generated tokens of one sequence, one at a time."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._counted = 0  # tokens since the reasoning opened
        self._num_forced = 0
        longest = max(len(budget.start_ids), len(budget.end_ids), 1)
        self._tail: deque[int] = deque(maxlen=longest)
        self.state = BudgetState.OPEN if budget.is_open else BudgetState.WAITING

    def forced(self) -> int | None:
        """The id that must come next, or None when the model is free to choose."""
        spent = self._counted >= self._budget.max_reasoning_tokens
        if self.state is BudgetState.OPEN and spent and self._budget.forced_ids:
            self.state = BudgetState.FORCING
        if self.state is BudgetState.FORCING:
            return self._budget.forced_ids[self._num_forced]
        return None

    def push(self, token_id: int) -> None:
        """Notes a token that was appended to the completion."""
        if self.state is BudgetState.CLOSED:
            return
        if self.state is BudgetState.FORCING:
            self._num_forced += 1
            if self._num_forced == len(self._budget.forced_ids):
                self.state = BudgetState.CLOSED
            return
        self._tail.append(token_id)
        if self.state is BudgetState.WAITING:
            if self._ends_with(self._budget.start_ids):
                self.state = BudgetState.OPEN
                self._tail.clear()
            return
        self._counted += 1
        if self._ends_with(self._budget.end_ids):
            self.state = BudgetState.CLOSED

    def _ends_with(self, marker: tuple[int, ...]) -> bool:
        count = len(marker)
        return 0 < count <= len(self._tail) and tuple(self._tail)[-count:] == marker
