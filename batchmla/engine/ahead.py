"""A step is begun before the tokens of the one before it are known to the host.

The device has them already, and puts them where they belong. The host meanwhile reads, checks and
completes what came before: no step waits for it, and text lags one step. Sequences whose next step
depends on their token (masks, penalties, the end of a budget, the last token) are left out of the
step that begins too early for them, and so is what would take pages from others. A sequence that
turns out to have ended has one step too many, whose result counts for nothing.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

from batchmla.core import Completion
from batchmla.engine.forward import StepOutOfMemory
from batchmla.engine.group import Chunk
from batchmla.engine.runner import Runner, Started
from batchmla.engine.sampler import Draw
from batchmla.engine.scheduler import Scheduler

Settle = Callable[[Items[Chunk], Items[Draw | None], float], list[Completion]]
StepDown = Callable[[Items[Chunk], str], list[Completion]]


class Ahead:
    """One step under way at most, besides the one that is begun."""

    def __init__(self, scheduler: Scheduler, runner: Runner, settle: Settle, step_down: StepDown):
        """`settle` takes the chunks of a step with their draws and the time it began at;
        `step_down` those of one that did not fit, and what to say of it."""
        self._scheduler = scheduler
        self._runner = runner
        self._settle = settle
        self._step_down = step_down
        self._before: Started | None = None
        self._settled_at_s = 0.0

    def step(self) -> list[Completion]:
        """Begins a step and settles the one before it."""
        before, self._before = self._before, None
        started, fault = self._begin(before)
        completions = [] if before is None else self._settled(before)
        if fault is not None:
            chunks, sentence = fault
            completions += self._step_down(_live(chunks), sentence)
        if started is not None:
            self._scheduler.computed(_live(started.chunks))
            self._before = started
        return completions

    def forget(self) -> None:
        """What is under way counts for nothing."""
        self._before = None

    def _begin(
        self, before: Started | None
    ) -> tuple[Started | None, tuple[list[Chunk], str] | None]:
        """The next step, or the chunks that did not fit; neither where all has to wait."""
        if before is not None and self._scheduler.is_short:
            self._scheduler.is_short = False
            return None, None
        if before is not None:
            for chunk in before.chunks:
                if chunk.samples and chunk.sequence.can_run_ahead:
                    chunk.sequence.run_ahead()
        chunks = self._scheduler.schedule(may_preempt=before is None)
        if not chunks:
            assert before is not None, "nothing to run with sequences waiting"
            return None, None
        copies = [group.lanes.take_copies() for group in self._scheduler.groups]
        try:
            return self._runner.begin(chunks, copies, before), None
        except StepOutOfMemory as error:
            return None, (chunks, str(error))

    def _settled(self, before: Started) -> list[Completion]:
        draws = self._runner.end(before)
        pairs = [
            (chunk, draw)
            for chunk, draw in zip(before.chunks, draws, strict=True)
            if not chunk.sequence.is_over
        ]
        for chunk, _ in pairs:
            if chunk.sequence.is_ahead:
                chunk.sequence.take_back()
        began_s = max(before.began_s, self._settled_at_s)
        completions = self._settle(
            [chunk for chunk, _ in pairs], [draw for _, draw in pairs], began_s
        )
        self._settled_at_s = time.perf_counter()
        return completions


def _live(chunks: Items[Chunk]) -> list[Chunk]:
    return [chunk for chunk in chunks if not chunk.sequence.is_over]
