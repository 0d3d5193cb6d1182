"""How long a job takes: its rows, step by step as the scheduler would run them, under a clock.

Rows enter in order while places and pool last, prompts are computed in chunks beside the running
completions, and of steps that differ only by their context many are counted at once. No tokens, no
pages: a row is two lengths.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchmla.engine.costs import StepWork

Ints = npt.NDArray[np.int64]

MOST_ROWS = 20_000  # of a larger job evenly spread rows are run, and the time is scaled
GROWTH_HELD = 0.75  # of its completion, that a row is given room for when it enters


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """Lengths of all rows in their order; of a prompt the share `cached` is found in the cache."""

    prompt_tokens_R: Ints
    output_tokens_R: Ints
    cached: float = 0.0

    @property
    def count(self) -> int:
        return len(self.prompt_tokens_R)

    def every(self, stride: int) -> "JobRows":
        """Every so many-th row."""
        return JobRows(
            prompt_tokens_R=self.prompt_tokens_R[::stride],
            output_tokens_R=self.output_tokens_R[::stride],
            cached=self.cached,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What limits the steps of one attention group."""

    max_num_seqs: int
    max_batched_tokens: int
    pool_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasted:
    """`mean_rows`: that ran at once, over time."""

    seconds: float
    steps: int
    mean_rows: float


def predict(rows: JobRows, bounds: Bounds, step_s: Callable[[StepWork], float]) -> Forecasted:
    """The job on one group whose steps take `step_s`."""
    if rows.count == 0:
        return Forecasted(seconds=0.0, steps=0, mean_rows=0.0)
    stride = -(-rows.count // MOST_ROWS)
    found = _Run(rows.every(stride), bounds, step_s).go()
    scale = rows.count / -(-rows.count // stride)
    return Forecasted(
        seconds=found.seconds * scale, steps=round(found.steps * scale), mean_rows=found.mean_rows
    )


@dataclass(slots=True)
class _Prompt:
    """A prompt on its way: computed up to `done` of `total`; `output` tokens follow."""

    done: int
    total: int
    output: int
    held: int


class _Run:
    """One pass over the rows."""

    def __init__(self, rows: JobRows, bounds: Bounds, step_s: Callable[[StepWork], float]) -> None:
        self._rows = rows
        self._bounds = bounds
        self._step_s = step_s
        self._next_row = 0
        self._prompts: deque[_Prompt] = deque()
        self._ends: list[tuple[int, int, int]] = []  # last step, context there, tokens held
        self._context = 0  # of all running completions together
        self._held = 0
        self._step = 0
        self._seconds = 0.0
        self._row_s = 0.0

    def go(self) -> Forecasted:
        while self._admit() or self._prompts or self._ends:
            if self._prompts:
                self._mixed_step()
            else:
                self._completion_steps()
        mean_rows = self._row_s / self._seconds if self._seconds else 0.0
        return Forecasted(seconds=self._seconds, steps=self._step, mean_rows=mean_rows)

    def _admit(self) -> bool:
        """Whether rows entered."""
        entered = False
        while self._next_row < self._rows.count:
            running = len(self._prompts) + len(self._ends)
            prompt = int(self._rows.prompt_tokens_R[self._next_row])
            output = max(1, int(self._rows.output_tokens_R[self._next_row]))
            held = prompt + int(GROWTH_HELD * output)
            is_full = running >= self._bounds.max_num_seqs
            if is_full or (running and self._held + held > self._bounds.pool_tokens):
                break
            cached = min(int(prompt * self._rows.cached), prompt - 1)
            self._prompts.append(_Prompt(max(0, cached), prompt, output, held))
            self._held += held
            self._next_row += 1
            entered = True
        return entered

    def _mixed_step(self) -> None:
        """Prompt chunks beside one token of every running completion."""
        running = len(self._ends)
        left = max(1, self._bounds.max_batched_tokens - running)
        tokens = sampled = pairs = read = 0
        ready: list[_Prompt] = []
        while self._prompts and left > 0:
            prompt = self._prompts[0]
            count = min(left, prompt.total - prompt.done)
            pairs += count * prompt.done + count * (count + 1) // 2
            prompt.done += count
            read += prompt.done
            tokens += count
            left -= count
            if prompt.done < prompt.total:
                break
            sampled += 1
            ready.append(self._prompts.popleft())
        context = self._context + running
        self._count(
            1,
            StepWork(
                tokens=running + tokens,
                sampled=running + sampled,
                prompt_pairs=pairs,
                decode_pairs=context,
                kv_tokens=context + read,
            ),
        )
        self._context = context
        self._leave()
        for prompt in ready:
            if prompt.output == 1:
                self._held -= prompt.held
                continue
            last, length = self._step + prompt.output - 1, prompt.total + prompt.output - 1
            heapq.heappush(self._ends, (last, length, prompt.held))
            self._context += prompt.total

    def _completion_steps(self) -> None:
        """Up to the next end of a row."""
        running, count = len(self._ends), self._ends[0][0] - self._step
        middle = self._context + running * (count + 1) // 2
        self._count(
            count,
            StepWork(
                tokens=running,
                sampled=running,
                prompt_pairs=0,
                decode_pairs=middle,
                kv_tokens=middle,
            ),
        )
        self._context += running * count
        self._leave()

    def _count(self, steps: int, work: StepWork) -> None:
        seconds = steps * self._step_s(work)
        self._seconds += seconds
        self._row_s += seconds * (len(self._ends) + len(self._prompts))
        self._step += steps

    def _leave(self) -> None:
        while self._ends and self._ends[0][0] <= self._step:
            _, context, held = heapq.heappop(self._ends)
            self._context -= context
            self._held -= held
