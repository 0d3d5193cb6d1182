"""Which rows of a step are attended together, and to which pages. Shapes: see
`batchmla.kernels.ops`."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

EXPANDED_BYTES = 2**28  # of keys and values that kernels of GPUs make from latents at a time


@dataclass(frozen=True, slots=True)
class PageRun:
    """Each sequence has consecutive pages, and sequence g begins at page `first + g * stride`."""

    first: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sequences that are attended in one call, padded to Q queries and L keys each.

    Its rows follow each other from `first_row` of the groups' order, sequence by sequence;
    `grid_N` is where they stand in the padded [G*Q] grid, None when the grid has no padding.
    `pages_GP` holds the pages of the keys, padded with page 0; of their P*B rows the first L count.
    `bias_GQL` is added to the scores: 0 where a query sees a key, -inf elsewhere; None when every
    query sees every key, or when `is_causal`: query i sees keys 0..L-Q+i. `page_run` is set when
    the pages form one.

    `query_block` (exact mode) says how many queries a call may hold: they go in blocks of so many,
    each with keys up to its own last query; the group is causal and `bias_GQL` holds the last
    block only, [1, block, L]. The first `num_shared` keys of such a group are the same rows for all
    of its sequences, and for groups next to it with the same pages: to be expanded once.
    """

    num_sequences: int
    num_queries: int
    num_keys: int
    first_row: int
    pages_GP: torch.Tensor
    grid_N: torch.Tensor | None = None
    bias_GQL: torch.Tensor | None = None
    is_causal: bool = False
    page_run: PageRun | None = None
    query_block: int | None = None
    num_shared: int = 0

    @property
    def num_rows(self) -> int:
        """Rows without padding."""
        return self.num_sequences * self.num_queries if self.grid_N is None else len(self.grid_N)


HostInts = npt.NDArray[np.int64]


class Kept:
    """What a back end makes once a step, such as tables on its device, and every layer reads."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._refills: list[Callable[[Spans], None]] = []

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` made when `key` was first asked for."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def follow(self, refill: Callable[["Spans"], None]) -> None:
        """`refill` writes what stands for other spans in the place of what is there."""
        self._refills.append(refill)

    def refill(self, spans: "Spans") -> None:
        """Everything that was made, for other spans: recorded launches read it where it is."""
        for each in self._refills:
            each(spans)

    def put(self, key: Hashable, made: Any) -> None:
        """In the place of what would be made."""
        self._made[key] = made


@dataclass(frozen=True, slots=True)
class Shared:
    """Sequences of one query each, by their places among the G of the spans, whose first
    `num_keys` keys are the same rows, in the same pages."""

    places: HostInts
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """G sequences as they lie in the cache, for a back end that reads pages by itself.

    Sequence g has the rows from `first_row_G[g]` of T on, one for each of its queries; its last
    query sees all `num_keys_G[g]` keys, the one before it all but the last. Its pages are row
    `table_row_G[g]` of `pages_GP`: page ids, or with `pages_U` positions in that list of distinct
    pages, which are expanded once. `shared` may name what sequences have in common, each in at
    most one of them: a back end may read that once for all of them, if no result changes by it.
    """

    first_row_G: HostInts
    num_queries_G: HostInts
    num_keys_G: HostInts
    table_row_G: HostInts
    pages_GP: HostInts
    page_tokens: int
    pages_U: torch.Tensor | None = None
    shared: tuple[Shared, ...] = ()
    kept: Kept = field(default_factory=Kept, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return int(self.num_queries_G.sum())

    def rows(self) -> torch.Tensor:
        """The rows of T, sequence by sequence."""
        counts_G = self.num_queries_G
        shift_G = self.first_row_G - (np.cumsum(counts_G) - counts_G)
        return torch.from_numpy(np.arange(self.num_rows) + np.repeat(shift_G, counts_G))


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Groups and the rows of T they cover, in the groups' order; None: all rows as they stand.

    A prefix is a group, of one sequence or of one query a sequence, whose queries see every key.
    Its rows are rows of members too: their softmax runs over the keys of the member and of all
    prefixes they are in. `is_split` (exact mode): a row's result must not depend on which rows
    share its prefixes, nor on whether others have any. A back end that reads pages by itself is
    given `spans` instead of groups.
    """

    members: tuple[Group, ...]
    rows_N: torch.Tensor | None = None
    prefixes: tuple[Group, ...] = ()
    is_split: bool = False
    spans: tuple[Spans, ...] = ()
