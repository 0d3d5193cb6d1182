"""Model and cache of one rank: what every rank does in a step, told by numbers on the host alone.

N rows whose logits are wanted, M model width, V vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import zip_longest

import torch

from batchmla.engine.graphs import DecodeGraphs, Recorder
from batchmla.engine.late import Late
from batchmla.engine.step import StepTables
from batchmla.engine.stream import put
from batchmla.errors import DeviceError
from batchmla.kv.cache import make_cache
from batchmla.kv.lanes import Copy
from batchmla.kv.layout import KVLayout
from batchmla.layers.block import walk
from batchmla.layers.embed import Head
from batchmla.layers.experts import Serving, SpreadExperts
from batchmla.models.base import Model
from batchmla.parallel import Par

_CPU_WORDS = ("can't allocate memory", "not enough memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """One step of an attention group, the same on each of its ranks.

    Pages are zeroed and lanes copied before the forward pass; `scored` are ranges of its rows whose
    logits are wanted before those of `tables.logits_rows_N`. `tables` None: the group has nothing
    to compute, but may hold what others need.
    """

    tables: StepTables | None
    late: Late | None = None
    copies: Items[Copy] = ()
    cleared_pages: Items[int] = ()
    scored: Items[range] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of its step."""
        return 0 if self.tables is None else len(self.tables.tokens_T)

    @property
    def num_logits(self) -> Iterator[int]:
        """Rows of each of the tensors of logits that follow from it."""
        yield from map(len, self.scored)
        if self.tables is not None and len(self.tables.logits_rows_N):
            yield len(self.tables.logits_rows_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step of all attention groups. `counts_experts`: rank 0 is told how often experts were
    chosen so far."""

    groups: tuple[GroupWork, ...]
    counts_experts: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(each.num_tokens for each in self.groups)

    @property
    def logits_rounds(self) -> Iterator[tuple[int, ...]]:
        """Rows of every group's first tensor of logits, of its second, …; 0 where it has none."""
        return zip_longest(*(each.num_logits for each in self.groups), fillvalue=0)


class Forward:
    """Owns the cache tensors; the page ids come from the scheduler."""

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        num_pages: int,
        num_lanes: int,
        device: torch.device,
        *,
        is_exact: bool = False,
        par: Par | None = None,
        dtype: torch.dtype = torch.float32,
        vocab_size: int = 0,
        recorder: Recorder | None = None,
        max_model_len: int = 0,
    ) -> None:
        """`is_exact` marks every step; the model must be built with exact ops then. `dtype` of the
        model and its `vocab_size` matter where there are several attention groups. With a
        `recorder` decode steps of sequences up to `max_model_len` tokens are replayed.
        """
        self.expert_counts: list[list[int]] = []  # by layer and expert, as last collected
        self._par = Par.single() if par is None else par
        self._dtype = dtype
        self._vocab_size = vocab_size
        blocks = list(walk(model))
        self._heads = [block for block in blocks if isinstance(block, Head)]
        self._serving = [
            block for block in blocks if isinstance(block, Serving) and not isinstance(block, Head)
        ]
        self._spread = [block for block in blocks if isinstance(block, SpreadExperts)]
        self._model = model
        self._is_exact = is_exact
        self._layout = layout
        self._device = device
        try:
            has_spare = recorder is not None
            self._cache = make_cache(layout, num_pages + has_spare, device, num_lanes)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise DeviceError(
                f"the KV pool of {num_pages * layout.page_bytes} bytes could not be allocated; "
                "lower model.memory_utilization"
            ) from error
        self._graphs = None
        if recorder is not None:
            self._graphs = DecodeGraphs(
                model, self._cache,
                page_tokens=layout.page_tokens, spare_page=num_pages, max_model_len=max_model_len,
                device=device, recorder=recorder,
            )  # fmt: skip

    def run(self, work: Work) -> Iterator[torch.Tensor]:
        """On rank 0, float32 logits [N, V] of every scored range and then of the rows that are
        sampled, if any: the first of every group that has some, the second of every group, …

        Must be taken to its end, in inference mode, and on every rank.
        """
        place = self._par.placement
        if any(each.tables is not None for each in work.groups):
            self._par.group_rows = [each.num_tokens for each in work.groups]
            own = self._run_group(work.groups[place.group])
            for rows in work.logits_rounds:
                self._par.group_rows = rows
                logits_NV = next(own) if rows[place.group] else None
                if logits_NV is None:
                    self._serve_head()
                yield from self._brought(rows, logits_NV)
        if work.counts_experts:
            self._collect()

    def _brought(self, rows: Items[int], logits_NV: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """To rank 0, one round's logits of all groups; `logits_NV` are those of this rank's."""
        place = self._par.placement
        if logits_NV is not None and place.group == 0:
            yield logits_NV
        elif logits_NV is not None and place.tensor_rank == 0:
            self._par.send(logits_NV)
        if place.rank == 0:
            for group, num_rows in enumerate(rows):
                if group and num_rows:
                    shape = (num_rows, self._vocab_size)
                    yield self._receive(group, torch.empty(shape, device=self._device))

    def _serve_head(self) -> None:
        for head in self._heads:
            head.serve(self._dtype, self._device)

    def _run_group(self, work: GroupWork) -> Iterator[torch.Tensor]:
        """Computes the step; its logits when they are taken."""
        self._clear(work.cleared_pages)
        self._copy_lanes(work.copies)
        if work.tables is None:
            for block in self._serving:
                block.serve(self._dtype, self._device)
            return iter(())
        if self._graphs is not None and not work.scored:
            logits_NV = self._graphs.logits(work.tables, work.late)
            if logits_NV is not None:
                return iter((logits_NV,))
        step = work.tables.on(self._device, self._layout.page_tokens, is_exact=self._is_exact)
        if work.late is not None:
            rows_N = put(work.late.rows_N, self._device)
            step.tokens_T.index_copy_(0, rows_N, work.late.ids_N)
        hidden_TM = self._model.forward(step, self._model.plan(step), self._cache)
        return self._logits(hidden_TM, work.scored, step.logits_rows_N)

    def _logits(
        self, hidden_TM: torch.Tensor, scored: Items[range], sampled_N: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        for rows in scored:
            yield self._model.logits(hidden_TM[rows.start : rows.stop])
        if len(sampled_N):
            yield self._model.logits(hidden_TM[sampled_N])

    def _receive(self, group: int, into: torch.Tensor) -> torch.Tensor:
        """From the first rank of another group."""
        return self._par.receive(group * self._par.placement.tensor, into)

    def _collect(self) -> None:
        """Adds up what the groups chose."""
        place = self._par.placement
        if place.tensor_rank or not self._spread:
            return
        counts_LE = torch.stack([each.chosen for each in self._spread]).to(self._device)
        if place.group:
            self._par.send(counts_LE)
            return
        for group in range(1, place.attention_data):
            counts_LE += self._receive(group, torch.empty_like(counts_LE))
        self.expert_counts = counts_LE.tolist()

    def _clear(self, pages: Items[int]) -> None:
        """Zeroes pages that may hold non-finite rows: masked or not, those would poison their next
        holder.
        """
        if not pages:
            return
        rows = torch.tensor(pages, device=self._device)
        for layer, parts in zip(self._cache, self._layout.layers, strict=True):
            for part in parts:
                if part.window is None:
                    layer[part.name][rows] = 0

    def _copy_lanes(self, copies: Items[Copy]) -> None:
        """One after the other: a lane may be written and read again."""
        for source, target in copies:
            for layer, parts in zip(self._cache, self._layout.layers, strict=True):
                for part in parts:
                    if part.window is not None:
                        layer[part.name][target] = layer[part.name][source]


class StepOutOfMemory(DeviceError):
    """A step did not fit; nothing of it counts, and a smaller one may."""


def is_out_of_memory(error: Exception) -> bool:
    """CUDA has a class for it; the CPU allocator raises a plain RuntimeError."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or any(words in str(error) for words in _CPU_WORDS)


def out_of_memory(num_tokens: int) -> StepOutOfMemory:
    """What is said of a step of so many tokens that did not fit."""
    return StepOutOfMemory(
        f"the device ran out of memory in a step of {num_tokens} tokens; lower "
        "engine.max_batched_tokens, engine.max_num_seqs or model.memory_utilization"
    )
