"""How large a step may be after one ran out of memory: halved at once, doubled again slowly.

Host only; knows no tensors. The limits of the configuration are never exceeded.
"""

from batchmla.engine.group import Limits

CALM_STEPS = 64  # good steps before a limit is doubled again; twice as many after each relapse
MOST_CALM_STEPS = 4096
LEAST_TOKENS = 16  # of a step: one sequence that fails with so few cannot be helped


class Relief:
    """`most_seqs` and `most_tokens` of the next step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calm_steps = CALM_STEPS
        self._good_steps = 0
        self.most_seqs = limits.max_num_seqs
        self.most_tokens = limits.max_batched_tokens
        self.step_downs = 0

    @property
    def is_in_force(self) -> bool:
        """Whether a step may be less than the configuration allows."""
        limits = self._limits
        return (self.most_seqs, self.most_tokens) != (
            limits.max_num_seqs,
            limits.max_batched_tokens,
        )

    def step_down(self, num_seqs: int, num_tokens: int, num_running: int) -> bool:
        """After a step of so many sequences and tokens failed, with `num_running` in the pool.

        False when there is nothing left to take away: one sequence, and the smallest chunk.
        """
        if num_seqs <= 1 and num_tokens <= LEAST_TOKENS:
            return False
        if self.step_downs:
            self._calm_steps = min(2 * self._calm_steps, MOST_CALM_STEPS)
        self.step_downs += 1
        self._good_steps = 0
        self.most_seqs = max(1, min(self.most_seqs, num_running) // 2)
        self.most_tokens = max(1, min(self.most_tokens, num_tokens) // 2)
        if self.most_seqs == 1:
            self.most_tokens = max(self.most_tokens, min(LEAST_TOKENS, num_tokens))
        return True

    def step_done(self) -> bool:
        """After a step that went well; True when a limit was raised for it."""
        if not self.is_in_force:
            return False
        self._good_steps += 1
        if self._good_steps < self._calm_steps:
            return False
        self._good_steps = 0
        self.most_seqs = min(2 * self.most_seqs, self._limits.max_num_seqs)
        self.most_tokens = min(2 * self.most_tokens, self._limits.max_batched_tokens)
        return True
