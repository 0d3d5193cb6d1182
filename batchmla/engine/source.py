"""Where the engine takes its prompts from, besides the pipeline."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

from batchmla.core import Prompt
from batchmla.kv.pages import Future


@runtime_checkable
class ForesightSource(Protocol):
    """A `PromptSource` that knows prompts before they are taken."""

    def foresee(self, page_tokens: int) -> Future | None:
        """Which pages its prompts will want, told by their hashes; None if it does not look."""
        ...


class ListSource:
    """A `PromptSource` over prompts in order."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._left = iter(prompts)

    def take(self, limit: int, *, wait: bool) -> Sequence[Prompt]:
        """The next of them; none is ever waited for."""
        return list(islice(self._left, limit))
