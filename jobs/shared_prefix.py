"""How much of the prompts the prefix cache can serve, as far as their tokens tell."""

import numpy as np

from batchmla.core import TokenIds
from batchmla.kv.pages import PageHash, chain_hashes

MOST_PAGES = 500_000  # whose hashes are kept; later ones are looked up only


class SharedPrefix:
    """The beginning that all prompts share, and the tokens that a prompt has in common, by whole
    pages from its start, with one before it.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._common: TokenIds | None = None
        self._seen: set[PageHash] = set()
        self.reusable_tokens = 0

    @property
    def common_tokens(self) -> int:
        """Tokens at the start of every prompt; 0 without prompts."""
        return 0 if self._common is None else len(self._common)

    def add(self, token_ids: TokenIds, count: int) -> None:
        """A prompt that comes `count` times. Its last token is always computed."""
        if count == 0:
            return
        if self._common is None:
            self._common = token_ids
        else:
            self._common = self._common[: _equal(self._common, token_ids)]
        names: list[PageHash] = []
        usable = max(0, len(token_ids) - 1) // self._page_tokens
        chain_hashes(names, token_ids, self._page_tokens, usable * self._page_tokens)
        hits = next((place for place, name in enumerate(names) if name not in self._seen), usable)
        if len(self._seen) + usable <= MOST_PAGES:
            self._seen.update(names)
        self.reusable_tokens += (hits + (count - 1) * usable) * self._page_tokens


def _equal(first: TokenIds, second: TokenIds) -> int:
    """How many leading tokens are the same."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
