"""Decode steps recorded once and replayed: launches of a step cost the host nothing then.

A recording is for so many rows and so long contexts; a step takes the smallest that holds it. Its
tensors stay where they are and are filled before every replay: rows that are not there have no
keys, and write to a page that nobody reads. Models whose plans are tables on the device can be
recorded; steps with prompts in them run as they are. S sequences, R rows of a recording, P pages
of its longest context, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from batchmla.engine.late import Late
from batchmla.engine.step import StepTables
from batchmla.engine.stream import put
from batchmla.kernels.groups import Kept, Spans
from batchmla.kv.cache import LayerCache
from batchmla.kv.step import HostInts, Step
from batchmla.models.base import Model

logger = logging.getLogger(__name__)

MOST_ROWS = 512
ROW_STEPS = ((8, 1), (64, 8), (256, 32), (MOST_ROWS, 64))  # (up to, in steps of)
SHORTEST_CONTEXT = 1024
SPARE_TOKENS = 2048  # of a row: kernels part its keys into runs of no more, the last one shorter
SHARING = 2  # what sequences of a step hold together, at most, as a multiple of the pool


def row_bucket(num_rows: int) -> int | None:
    """Rows of the smallest recording for so many; None: too many for any."""
    for most, step in ROW_STEPS:
        if num_rows <= most:
            return -(-num_rows // step) * step
    return None


def context_bucket(context: int, max_model_len: int) -> int:
    """Tokens of the shortest recording for such a context: 1024 times a power of 4, at most what a
    sequence may have."""
    tokens = SHORTEST_CONTEXT
    while tokens < context:
        tokens *= 4
    return min(tokens, max_model_len)


class Recorder(Protocol):
    """Records what is launched on a device."""

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Runs `run` to warm up, then records it; calling the result replays it and returns the
        tensor that `run` returned, filled anew."""
        ...


class CudaRecorder:
    """CUDA graphs with one pool of memory. Has not yet run on a GPU."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See `Recorder`."""
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            run()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            filled = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return filled

        return replay


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    """The tensors that a recording reads, as views of one buffer, and its replay."""

    buffer: torch.Tensor
    step: Step
    replay: Callable[[], torch.Tensor]


class DecodeGraphs:
    """Recordings of one model, made when they are first wanted."""

    def __init__(
        self,
        model: Model,
        cache: Sequence[LayerCache],
        *,
        page_tokens: int,
        spare_page: int,
        max_model_len: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        """`spare_page` of the cache belongs to no sequence."""
        self._model = model
        self._cache = cache
        self._page_tokens = page_tokens
        self._spare_slot = spare_page * page_tokens
        self._max_model_len = max_model_len
        self._device = device
        self._recorder = recorder
        self._recordings: dict[tuple[int, int], _Recording] = {}

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and tokens of context of the recordings that there are."""
        return sorted(self._recordings)

    def logits(self, tables: StepTables, late: Late | None) -> torch.Tensor | None:
        """float32 [S, V] of a step of single tokens whose logits are all wanted, valid until the
        next one; None where it has to run as it is."""
        num_rows = len(tables.tokens_T)
        rows = row_bucket(num_rows)
        if rows is None or num_rows != len(tables.context_S):
            return None
        if len(tables.logits_rows_N) != num_rows:
            return None
        context = context_bucket(int(tables.context_S.max()), self._max_model_len)
        mean = self._mean(rows, context)
        if mean < context and int(tables.context_S.sum()) > rows * (mean - SPARE_TOKENS):
            return None
        recording = self._recordings.get((rows, context))
        if recording is None:
            recording = self._recordings[rows, context] = self._record(rows, context)
        self._fill(recording, tables, late)
        return recording.replay()[:num_rows]

    def _mean(self, rows: int, context: int) -> int:
        """The context that all rows of a recording have: what the pool holds of so many, not the
        longest, or tables and partial results would be larger than any step's by far."""
        return min(context, SHARING * self._spare_slot // rows + SPARE_TOKENS)

    def _record(self, rows: int, context: int) -> _Recording:
        """No step that is replayed needs larger tables."""
        num_pages = -(-context // self._page_tokens)
        buffer = torch.zeros(rows * (4 + num_pages), dtype=torch.int64, device=self._device)
        sizes = [rows, rows, rows, rows, rows * num_pages]
        tokens_R, positions_R, slots_R, lanes_R, pages = torch.split(buffer, sizes)
        slots_R.fill_(self._spare_slot)
        everyone, mean = np.arange(rows + 1), self._mean(rows, context)
        step = Step(
            tokens_T=tokens_R,
            positions_T=positions_R,
            slots_T=slots_R,
            pages_SP=pages.view(rows, num_pages),
            logits_rows_N=torch.arange(rows, device=self._device),
            page_tokens=self._page_tokens,
            host_starts_S1=everyone,
            host_context_S=np.full(rows, mean),
            host_prompt_S=np.full(rows, mean - 1),
            lanes_S=lanes_R,
            host_pages_SP=np.zeros((rows, num_pages), np.int64),
            kept=Kept(),
        )

        def run() -> torch.Tensor:
            hidden_RM = self._model.forward(step, self._model.plan(step), self._cache)
            return self._model.logits(hidden_RM)

        logger.info("recording decode steps of %d rows and %d tokens of context", rows, context)
        return _Recording(buffer=buffer, step=step, replay=self._recorder.record(run))

    def _fill(self, recording: _Recording, tables: StepTables, late: Late | None) -> None:
        step, num_rows = recording.step, len(tables.tokens_T)
        rows, num_pages = step.pages_SP.shape
        absent = rows - num_rows

        def padded(values: HostInts, filler: int = 0) -> HostInts:
            return np.concatenate((values, np.full(absent, filler, np.int64)))

        pages_RP = np.zeros((rows, num_pages), np.int64)
        held = min(num_pages, tables.pages_SP.shape[1])
        pages_RP[:num_rows, :held] = tables.pages_SP[:, :held]
        parts = (
            padded(tables.tokens_T),
            padded(tables.positions_T),
            padded(tables.slots_T, self._spare_slot),
            padded(tables.lanes_S),
            pages_RP.ravel(),
        )
        recording.buffer.copy_(put(np.concatenate(parts), self._device), non_blocking=True)
        if late is not None:
            rows_N = put(late.rows_N, self._device)
            step.tokens_T.index_copy_(0, rows_N, late.ids_N)
        assert step.kept is not None
        step.kept.refill(
            Spans(
                first_row_G=np.arange(rows),
                num_queries_G=np.ones(rows, np.int64),
                num_keys_G=padded(tables.context_S),
                table_row_G=np.arange(rows),
                pages_GP=pages_RP,
                page_tokens=self._page_tokens,
            )
        )
