"""Greedy prompts that equal one that waits or runs: they are not run, but take its completion.

A twin has the same ids and the same sampling, at temperature 0. A prompt whose equal has ended
already runs again: completions are not kept.
"""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from batchmla.core import Completion, Prompt

_PROMPT_BYTES = 400  # of the objects around the ids


class Waiting(NamedTuple):
    """A prompt with its row's place in the input."""

    prompt: Prompt
    file: int
    number: int

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.prompt.token_ids) + _PROMPT_BYTES


class Twins:
    """Who waits for whose completion. A leader is the first of equal prompts."""

    def __init__(self) -> None:
        self.count = 0  # of rows that took another's completion
        self._leaders: dict[bytes, Waiting] = {}
        self._name_of: dict[int, bytes] = {}  # by the leader's index
        self._twins: dict[int, list[Waiting]] = {}

    def joins(self, waiting: Waiting) -> bool:
        """Whether an equal prompt is under way, whose completion will do; else it may lead."""
        prompt = waiting.prompt
        if prompt.params.temperature > 0:
            return False
        name = blake2b(prompt.token_ids.tobytes(), digest_size=16).digest()
        leader = self._leaders.get(name)
        if leader is None:
            self._leaders[name] = waiting
            self._name_of[prompt.index] = name
            return False
        if leader.prompt.params != prompt.params:
            return False
        prompt.token_ids = leader.prompt.token_ids  # one copy of them
        self._twins.setdefault(leader.prompt.index, []).append(waiting)
        return True

    def ended(self, completion: Completion) -> Iterator[tuple[Waiting, Completion]]:
        """The twins of a leader, each with a completion of its own; nothing waits for it now."""
        name = self._name_of.pop(completion.index, None)
        if name is None:
            return
        leader = self._leaders.pop(name).prompt
        for twin in self._twins.pop(completion.index, ()):
            self.count += 1
            prompt, error = twin.prompt, completion.error
            if error is not None:
                error = error.replace(f"row {leader.row_id}", f"row {prompt.row_id}")
            yield (
                twin,
                replace(
                    completion,
                    row_id=prompt.row_id,
                    index=prompt.index,
                    sample=prompt.sample,
                    error=error,
                ),
            )
