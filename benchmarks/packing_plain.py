"""The engine's own loop, scheduler and page table under a clock that follows the roofline."""

from collections.abc import Sequence

import torch
from packing_machines import Machine
from packing_trace import STOP_ID

from batchmla.engine.costs import StepWork
from batchmla.engine.engine import EngineCore
from batchmla.engine.group import Chunk, Limits
from batchmla.engine.sampler import Draw
from batchmla.engine.sequence import Sequence as Row
from batchmla.kernels.cpu.sample import sample
from batchmla.kv.layout import KVLayout, KVPart
from batchmla.kv.pages import PageTable

GENERATED_ID = 2


class Clock:
    """Stands in for model, cache and sampler: draws what the trace says and counts the time."""

    def __init__(self, machine: Machine, output_tokens: Sequence[int], *, overlap: str) -> None:
        costs = machine.costs
        self._machine = machine
        self._output_tokens = output_tokens
        self._step_s = {
            "all": costs.step_s,
            "some": costs.serial_step_s,
            "none": costs.separate_step_s,
        }[overlap]
        self.pages: PageTable
        self.seconds = 0.0
        self.steps: list[tuple[float, int]] = []  # seconds and sequences
        self.held_page_s = 0.0
        self.compute_s = 0.0  # that the steps would take if reading took no time
        self.read_s = 0.0  # and the other way round

    def run(self, chunks: Sequence[Chunk], copies: object = ()) -> list[Draw | None]:
        """A step: its time, and a draw for every chunk that is due."""
        return self.run_with(chunks, decodes=0, context_tokens=0)

    def run_with(
        self, chunks: Sequence[Chunk], *, decodes: int, context_tokens: int
    ) -> list[Draw | None]:
        """A step of these chunks besides completions that have so much context together."""
        tokens = sampled = decodes
        decode_pairs = context = context_tokens
        prompt_pairs = 0
        draws: list[Draw | None] = []
        for row, start, count, samples in chunks:
            end = start + count
            tokens += count
            context += end
            if count == 1:
                decode_pairs += end
            else:
                prompt_pairs += count * start + count * (count + 1) // 2
            sampled += samples
            draws.append(self.draw(row) if samples else None)
        held = self.pages.used_pages * self.pages.page_tokens
        work = StepWork(
            tokens=tokens,
            sampled=sampled,
            prompt_pairs=prompt_pairs,
            decode_pairs=decode_pairs,
            kv_tokens=min(held, context) if self._machine.reads_once else context,
        )
        self._count(work, decodes + len(chunks))
        return draws

    def draw(self, row: Row) -> Draw:
        """The next token, or the end."""
        is_over = row.num_generated >= self._output_tokens[row.prompt.index]
        return Draw(token_id=STOP_ID if is_over else GENERATED_ID)

    def steps_left(self, row: Row) -> int:
        """Until the step that ends the row, from one on that draws its next token (0: that one)."""
        left = row.max_total - row.num_tokens - 1
        if row.prompt.params.stop_ids:
            left = min(left, self._output_tokens[row.prompt.index] - row.num_generated)
        return left

    def forget(self, row: Row) -> None:
        """Nothing is kept of a row."""

    def forget_all(self) -> None:
        """Nothing is kept of any row."""

    def clear(self, pages: Sequence[int]) -> None:
        """There is no memory to clear."""

    def _count(self, work: StepWork, sequences: int) -> None:
        rates, costs = self._machine.rates, self._machine.costs
        step_s = self._step_s(work, rates)
        self.seconds += step_s
        self.held_page_s += step_s * self.pages.used_pages
        self.compute_s += costs.flops(work) / rates.flops_per_s
        self.read_s += costs.bytes(work) / rates.bytes_per_s
        self.steps.append((step_s, sequences))


class SimulatedEngine(EngineCore):
    """The engine without its runner."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        part = KVPart(name="token", width=1, dtype="uint8")
        super().__init__(
            clock,  # type: ignore[arg-type]
            KVLayout(layers=((part,),), page_tokens=machine.page_tokens),
            num_pages=machine.pool_tokens // machine.page_tokens,
            limits=Limits(
                max_model_len=machine.max_model_len,
                max_num_seqs=machine.max_num_seqs,
                max_batched_tokens=machine.max_batched_tokens,
            ),
            sample=sample,
            vocab_limit=1 << 30,
            device=torch.device("cpu"),
        )
        self._runner = clock  # type: ignore[assignment]
        clock.pages = self._scheduler.groups[0].pages
