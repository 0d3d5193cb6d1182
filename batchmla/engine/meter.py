"""How long steps took, beside what they did: what a calibration is fitted to."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from batchmla.engine.costs import StepWork
from batchmla.engine.group import Chunk

MOST_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of the engine."""

    work: StepWork
    seconds: float


def work_of(chunks: Items[Chunk]) -> StepWork:
    """What a step over these chunks does; a page that several sequences hold counts for each."""
    tokens = sampled = prompt_pairs = decode_pairs = kv_tokens = 0
    for _, start, count, samples in chunks:
        end = start + count
        tokens += count
        kv_tokens += end
        sampled += samples
        if count == 1:
            decode_pairs += end
        else:
            prompt_pairs += count * start + count * (count + 1) // 2
    return StepWork(
        tokens=tokens,
        sampled=sampled,
        prompt_pairs=prompt_pairs,
        decode_pairs=decode_pairs,
        kv_tokens=kv_tokens,
    )


class StepMeter:
    """Keeps up to `MOST_SAMPLES` steps, spread evenly over all that were seen."""

    def __init__(self) -> None:
        self._stride = 1
        self._seen = 0
        self.samples: list[TimedStep] = []

    def add(self, chunks: Items[Chunk], seconds: float) -> None:
        """Notes a step."""
        self._seen += 1
        if self._seen % self._stride:
            return
        self.samples.append(TimedStep(work_of(chunks), seconds))
        if len(self.samples) == MOST_SAMPLES:
            self.samples = self.samples[1::2]
            self._stride *= 2

    def forget(self) -> None:
        """Begins again."""
        self._stride, self._seen, self.samples = 1, 0, []
