"""The reasoning budget of one sequence: counts generated tokens inside the reasoning, then dictates
the end.
States: waiting for the opening marker → open → (budget spent, or a loop) forcing → closed; a
complete end marker written by the model closes it too. Closed is final.
"""

from collections import deque
from enum import Enum, auto

from batchmla.core import Budget
from batchmla.engine.loops import LoopWatch


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
        self._loops = None if budget.loop_repeats is None else LoopWatch(budget.loop_repeats)
        self.state = BudgetState.OPEN if budget.is_open else BudgetState.WAITING
        self.has_looped = False  # the loop guard forced the end, not the budget
        self._may_repeat = budget.is_open  # the first tokens may be the prompt's marker once more

    @property
    def marker_ids(self) -> tuple[int, ...]:
        """The opening marker that a model may begin its completion with."""
        return self._budget.start_ids

    def forced(self) -> int | None:
        """The id that must come next, or None when the model is free to choose."""
        if self.state is BudgetState.OPEN and self._budget.forced_ids:
            most = self._budget.max_reasoning_tokens
            if most is not None and self._counted >= most:
                self.state = BudgetState.FORCING
            elif self._loops is not None and self._loops.has_looped:
                self.state = BudgetState.FORCING
                self.has_looped = True
        if self.state is BudgetState.FORCING:
            return self._budget.forced_ids[self._num_forced]
        return None

    @property
    def is_free_after_next(self) -> bool:
        """Whether the model is free to choose the token after the next, whatever the next is."""
        if self.state is BudgetState.CLOSED or not self._budget.forced_ids:
            return True
        most = self._budget.max_reasoning_tokens
        if self.state is BudgetState.WAITING:
            return most is None or most > 0
        if self.state is BudgetState.FORCING or (most is not None and self._counted + 1 >= most):
            return False
        return self._loops is None or not self._loops.may_loop_next

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
            return
        if self._may_repeat and self._counted == len(self._budget.start_ids):
            self._may_repeat = False
            if self._ends_with(self._budget.start_ids):
                self._counted = 0
                self._tail.clear()
                return
        if self._loops is not None:
            self._loops.push(token_id)

    def _ends_with(self, marker: tuple[int, ...]) -> bool:
        count = len(marker)
        if not 0 < count <= len(self._tail) or self._tail[-1] != marker[-1]:
            return False
        return tuple(self._tail)[-count:] == marker
