"""One step of DeepSeek-V4's attention as tables: what rows read, which entries are completed, and
what goes into the lanes. Pure host arithmetic, by position alone, so the same in every batch.

T tokens, S sequences, W window, E entries completed in the step, K entries read, N rows of a group.

Tables of places point into the rows that a step's sequences have in their lanes, S times so many,
followed by the step's own T rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchmla.attention.hybrid_parts import HybridDims, LayerKind
from batchmla.attention.sparse_rows import ChoosingRows, choosing_rows
from batchmla.kernels.hybrid_ops import HybridRows
from batchmla.kv.step import HostInts, Step
from batchmla.layers.rope import Rope

LEAST_ENTRIES = 16  # tables of entries are padded to powers of two from here on


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Rows of T that stay in lanes, and the flat rows of the lanes that they go to."""

    rows_X: torch.Tensor
    slots_X: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPlan:
    """Entries that the step completes, and the state that it leaves behind.

    `places_EN` are the tokens that an entry is made of; with overlap the earlier half is absent
    from a sequence's first entry. `slots_E` are flat rows of the paged parts.
    """

    places_EN: torch.Tensor
    is_first_E: torch.Tensor
    slots_E: torch.Tensor
    cos_ER: torch.Tensor
    sin_ER: torch.Tensor
    offsets_T: torch.Tensor  # of the step's tokens within their runs of `ratio`
    kept: Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPlan:
    """One step for the layers of one kind.

    `groups` cover all rows but the choosing ones, which read what their indexer chooses;
    `choosing_window` is what those read besides.
    """

    cos_TR: torch.Tensor
    sin_TR: torch.Tensor
    lanes_S: torch.Tensor
    kept: Kept
    groups: tuple[tuple[torch.Tensor | None, HybridRows], ...]
    entries: EntryPlan | None = None
    choosing: ChoosingRows | None = None
    choosing_window: HybridRows | None = None


class _Tokens:
    """A step's tokens on the host."""

    def __init__(self, step: Step) -> None:
        assert step.lanes_S is not None, "a step of a model with lanes names none"
        counts_S = np.diff(step.host_starts_S1)
        self.step = step
        self.firsts_S: HostInts = step.host_context_S - counts_S
        self.sequence_T = np.repeat(np.arange(step.num_sequences), counts_S)
        self.positions_T: HostInts = (
            np.arange(int(step.host_starts_S1[-1]))
            - step.host_starts_S1[self.sequence_T]
            + self.firsts_S[self.sequence_T]
        )
        self.lanes_S: HostInts = step.lanes_S.cpu().numpy()
        self.pages_SP: HostInts = step.pages_SP.cpu().numpy()

    def put(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.step.tokens_T.device)

    def places(self, size: int, sequences: HostInts, positions: HostInts) -> HostInts:
        """Of positions whose rows are in lanes of `size` rows or in the step."""
        firsts = self.firsts_S[sequences]
        in_step = self.step.num_sequences * size + self.step.host_starts_S1[sequences]
        in_lane = sequences * size + positions % size
        found: HostInts = np.where(positions >= firsts, in_step + positions - firsts, in_lane)
        return found

    def kept(self, size: int) -> Kept:
        """The last `size` tokens of each sequence."""
        is_last_T = self.positions_T >= self.step.host_context_S[self.sequence_T] - size
        rows_X = np.flatnonzero(is_last_T)
        lanes_X = self.lanes_S[self.sequence_T[rows_X]]
        slots_X = lanes_X * size + self.positions_T[rows_X] % size
        return Kept(rows_X=self.put(rows_X), slots_X=self.put(slots_X))

    def slots(self, ratio: int, sequences: HostInts, entries: HostInts) -> HostInts:
        """Flat rows of entries in their sequences' pages."""
        per_page = self.step.page_tokens // ratio
        pages = self.pages_SP[sequences, entries // per_page]
        found: HostInts = pages * per_page + entries % per_page
        return found


def plan(
    step: Step, ropes: dict[LayerKind, Rope], dims: HybridDims, count: int
) -> dict[str, HybridPlan]:
    """Once a step, for every kind of layer; `count` entries are chosen at most."""
    tokens = _Tokens(step)
    kept, window = tokens.kept(dims.window), _window(tokens, dims.window)
    plans = {}
    for kind, rope in ropes.items():
        cos_TR, sin_TR = rope.at(step.positions_T)
        groups: tuple[tuple[torch.Tensor | None, HybridRows], ...] = ((None, window),)
        entries = choosing = choosing_window = None
        if kind is not LayerKind.WINDOW:
            most = count if kind is LayerKind.CHOSEN else None
            entries = _entries(tokens, rope, dims, kind)
            groups = tuple(_groups(tokens, window, dims.ratio(kind), most))
            if most is not None:
                choosing = choosing_rows(step, most, dims.ratio(kind))
            if choosing is not None:
                rows_N = choosing.rows_N
                choosing_window = window if rows_N is None else _taken(window, rows_N)
        plans[kind.value] = HybridPlan(
            cos_TR=cos_TR, sin_TR=sin_TR, lanes_S=tokens.put(tokens.lanes_S), kept=kept,
            groups=groups, entries=entries, choosing=choosing, choosing_window=choosing_window,
        )  # fmt: skip
    return plans


def _window(tokens: _Tokens, size: int) -> HybridRows:
    """Each token and those before it, the nearest first; absent ones point at the token itself."""
    positions_TW = tokens.positions_T[:, None] - np.arange(size)
    positions_TW = np.where(positions_TW < 0, tokens.positions_T[:, None], positions_TW)
    sequences_T1 = tokens.sequence_T[:, None]
    return HybridRows(
        window_NW=tokens.put(tokens.places(size, sequences_T1, positions_TW)),
        window_count_N=tokens.put(np.minimum(tokens.positions_T + 1, size)),
    )


def _taken(window: HybridRows, rows_N: torch.Tensor) -> HybridRows:
    return HybridRows(
        window_NW=window.window_NW[rows_N], window_count_N=window.window_count_N[rows_N]
    )


def _entries(tokens: _Tokens, rope: Rope, dims: HybridDims, kind: LayerKind) -> EntryPlan:
    ratio, size = dims.ratio(kind), dims.state_tokens(kind)
    first_S = tokens.firsts_S // ratio
    counts_S = tokens.step.host_context_S // ratio - first_S
    sequence_E = np.repeat(np.arange(len(counts_S)), counts_S)
    starts_S = np.cumsum(counts_S) - counts_S
    entry_E = np.arange(len(sequence_E)) - starts_S[sequence_E] + first_S[sequence_E]
    positions_E = tokens.put(entry_E * ratio)
    cos_ER, sin_ER = rope.at(positions_E)
    before = size - ratio  # tokens of the run before, with overlap
    positions_EN = entry_E[:, None] * ratio + np.arange(-before, ratio)
    own_EN = entry_E[:, None] * ratio + np.arange(size) % ratio
    positions_EN = np.where(positions_EN < 0, own_EN, positions_EN)
    return EntryPlan(
        places_EN=tokens.put(tokens.places(size, sequence_E[:, None], positions_EN)),
        is_first_E=tokens.put(entry_E == 0),
        slots_E=tokens.put(tokens.slots(ratio, sequence_E, entry_E)),
        cos_ER=cos_ER,
        sin_ER=sin_ER,
        offsets_T=tokens.put(tokens.positions_T % ratio),
        kept=tokens.kept(size),
    )


def _groups(
    tokens: _Tokens, window: HybridRows, ratio: int, most: int | None
) -> Iterator[tuple[torch.Tensor | None, HybridRows]]:
    """Rows by the number of entries they see, padded: a row's table is as long in every batch."""
    visible_T = (tokens.positions_T + 1) // ratio
    powers_T = 2 ** np.ceil(np.log2(np.maximum(visible_T, LEAST_ENTRIES))).astype(np.int64)
    padded_T = np.where(visible_T == 0, 0, powers_T)
    for length in np.unique(padded_T).tolist():
        is_here_T = padded_T == length
        if most is not None:
            is_here_T &= visible_T <= most
        rows_N = np.flatnonzero(is_here_T)
        if len(rows_N) == 0:
            continue
        some = tokens.put(rows_N)
        near = window if len(rows_N) == len(visible_T) else _taken(window, some)
        found = near
        if length:
            places_K, seen_N1 = np.arange(length), visible_T[rows_N][:, None]
            entries_NK = np.where(places_K < seen_N1, places_K, 0)
            slots_NK = tokens.slots(ratio, tokens.sequence_T[rows_N][:, None], entries_NK)
            found = HybridRows(
                window_NW=near.window_NW,
                window_count_N=near.window_count_N,
                slots_NK=tokens.put(slots_NK),
                entry_count_N=tokens.put(visible_T[rows_N]),
            )
        yield (None if near is window else some), found
