"""Prompts that are all there from the start, as the engine takes them."""

from collections.abc import Iterable, Sequence
from itertools import islice

from batchmla.core import Prompt


class ListSource:
    """A `PromptSource` over prompts in order."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._left = iter(prompts)

    def take(self, limit: int, *, wait: bool) -> Sequence[Prompt]:
        """The next of them; none is ever waited for."""
        return list(islice(self._left, limit))
