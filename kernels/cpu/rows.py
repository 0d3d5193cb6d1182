"""Row counts at which a product gives a row the same bits, whatever shares the call.

oneDNN and MKL choose their loops by the shape of a product: a row of a product with 7 rows may be
summed in another order than the same row among 64. Its place in the call and its neighbours do not
matter. Which counts agree depends on the machine, so it is found by trial, once a kind of product.
T rows, I/O in/out features.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]  # [T, I] -> [T, O], or with more axes before T

MANY_ROWS = 64  # the other counts have to agree with this one, where products have many rows
FEW_ROWS = 16  # and with this one where they have few
COUNTS = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512)
TRIAL_ROWS = 512
CALL_COST_ROWS = 32  # a call costs about as much as so many more rows in it
ALIGNMENT_BYTES = 64  # loops may start differently on rows that are not aligned
SEED = 0


@dataclass(frozen=True, slots=True)
class RowCounts:
    """`counts` that agree, rising; `cuts[t]` is the cheapest first count for t rows."""

    counts: tuple[int, ...]
    cuts: tuple[int, ...]

    @staticmethod
    def of(counts: tuple[int, ...]) -> "RowCounts":
        """Cheapest covers of up to the largest count of rows."""
        costs, cuts = [0], [0]
        for num_rows in range(1, counts[-1] + 1):
            found = [count + CALL_COST_ROWS + costs[max(0, num_rows - count)] for count in counts]
            costs.append(min(found))
            cuts.append(counts[found.index(costs[-1])])
        return RowCounts(counts, tuple(cuts))

    def cut(self, num_rows: int) -> list[int]:
        """Counts that cover `num_rows`; the last may reach beyond."""
        blocks: list[int] = []
        while num_rows > 0:
            blocks.append(self.cuts[min(num_rows, self.counts[-1])])
            num_rows -= blocks[-1]
        return blocks

    def run(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """`product` over the rows of x (its last axis but one) in blocks padded with zeros."""
        axis, num_rows, start, parts = x.dim() - 2, x.shape[-2], 0, []
        for count in self.cut(num_rows):
            taken = min(count, num_rows - start)
            block = aligned(x.narrow(axis, start, taken), count)
            parts.append(product(block).narrow(axis, 0, taken))
            start += taken
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def aligned(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x itself if it has `num_rows` rows, is contiguous and aligned, else a copy that is."""
    have = x.shape[-2]
    if have == num_rows and x.is_contiguous() and x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    padded = x.new_empty(*x.shape[:-2], num_rows, x.shape[-1])
    padded[..., :have, :] = x
    padded[..., have:, :] = 0
    return padded


class RowTrials:
    """The row counts of every kind of product that was asked for."""

    def __init__(self) -> None:
        self._known: dict[Hashable, RowCounts] = {}
        self._made: dict[tuple[int, ...], RowCounts] = {}

    def counts(
        self,
        key: Hashable,
        make: Callable[[], tuple[Product, torch.Tensor]],
        base_rows: int = MANY_ROWS,
    ) -> RowCounts:
        """Of the products that `key` names; `make` gives one such product and TRIAL_ROWS rows."""
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._of(find_counts(*make(), base_rows))
            logger.debug("rows of %s: %s", key, known.counts)
        return known

    def _of(self, counts: tuple[int, ...]) -> RowCounts:
        if counts not in self._made:
            self._made[counts] = RowCounts.of(counts)
        return self._made[counts]


def find_counts(product: Product, x: torch.Tensor, base_rows: int) -> tuple[int, ...]:
    """The counts that give every row of x the bits it gets in a block of `base_rows`."""
    axis, total = x.dim() - 2, x.shape[-2]

    def rows(start: int, count: int) -> torch.Tensor:
        return product(aligned(x.narrow(axis, start, count), count))

    starts = range(0, total, base_rows)
    expected = torch.cat([rows(start, base_rows) for start in starts], dim=axis)
    turned = product(x.narrow(axis, 0, base_rows).flip(axis).contiguous()).flip(axis)
    if not torch.equal(turned, expected.narrow(axis, 0, base_rows)):
        logger.warning("products depend on the place of a row here; exact mode runs row by row")
        return (1,)
    return tuple(
        count
        for count in COUNTS
        if all(
            torch.equal(rows(start, count), expected.narrow(axis, start, count))
            for start in range(0, min(total, max(2 * count, 128)) - count + 1, count)
        )
    )


def cancelling(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """[x_TI, w_OI] whose products are 0 but for rounding, so that they show every change of order.

    Each input feature stands twice among the shuffled features, once with the other sign.
    """
    source = torch.Generator().manual_seed(SEED)
    half, odd = shape[1] // 2, shape[1] % 2
    order_I = torch.randperm(shape[1], generator=source)
    made = []
    for count, sign in ((num_rows, -1), (shape[0], 1)):
        values = torch.randn(count, half, generator=source)
        both = torch.cat((values, sign * values, values.new_zeros(count, odd)), dim=1)
        made.append(both[:, order_I].to(dtype).contiguous())
    return made
