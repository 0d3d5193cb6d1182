"""How long a prompt's completion will be, learned from those of prompts like it.

Like it: the same beginning (a system prompt stands for a task), and about as long. Where too few
of these have ended, the beginning alone counts, and before that all rows.
"""

from collections import OrderedDict

from batchmla.core import Completion, Prompt
from batchmla.jobs.estimate import LengthEstimate

BEGINNING_TOKENS = 64
ENOUGH_ROWS = 24
MAX_KINDS = 1024  # of prompts; the ones not seen for longest are forgotten

Kind = tuple[int, ...]


class PromptLengths:
    """Expected tokens by kinds of prompts. Used by the thread that takes prompts."""

    def __init__(self) -> None:
        self.all = LengthEstimate()
        self._kinds: OrderedDict[Kind, LengthEstimate] = OrderedDict()

    def learn(self, prompt: Prompt, completion: Completion) -> None:
        """Takes note of a completion; failed ones say nothing."""
        if completion.error is not None:
            return
        num_tokens = len(completion.token_ids)
        self.all.add(num_tokens)
        for kind in _kinds(prompt):
            estimate = self._kinds.get(kind)
            if estimate is None:
                estimate = self._kinds[kind] = LengthEstimate()
                if len(self._kinds) > MAX_KINDS:
                    self._kinds.popitem(last=False)
            else:
                self._kinds.move_to_end(kind)
            estimate.add(num_tokens)

    def expected(self, prompt: Prompt) -> int:
        """By the narrowest kind that is known well enough, within the prompt's own limits."""
        if self._kinds:
            for kind in _kinds(prompt):
                estimate = self._kinds.get(kind)
                if estimate is not None and estimate.count >= ENOUGH_ROWS:
                    return estimate.expected(prompt.params)
        return self.all.expected(prompt.params)


def _kinds(prompt: Prompt) -> tuple[Kind, Kind]:
    """From narrow to wide."""
    ids = prompt.token_ids
    beginning = hash(ids[:BEGINNING_TOKENS].tobytes())
    return (beginning, len(ids).bit_length()), (beginning,)
