"""What benchmarks/pipeline.py measures with: inputs, an engine without a model, a clock."""

import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchmla.core import Completion, EngineStats, FinishReason, Prompt, PromptSource
from batchmla.jobs.channel import Channel
from batchmla.jobs.journal import Journal
from batchmla.jobs.loop import Loop
from batchmla.jobs.pack import Packer
from batchmla.jobs.read import InputTable
from batchmla.jobs.write import Writer

GROUP_ROWS = 100_000
MAX_RUNNING = 256


def write_input(path: Path, num_rows: int) -> None:
    """Rows doc ("d<i>"), text (a question of about 80 characters), as Parquet or JSONL."""
    if path.suffix == ".parquet":
        schema = pa.schema([("doc", pa.string()), ("text", pa.string())])
        with pq.ParquetWriter(path, schema) as parquet:
            for docs, texts in _columns(num_rows):
                parquet.write_table(pa.table([docs, texts], schema=schema))
        return
    with path.open("wb") as file:
        for docs, texts in _columns(num_rows):
            lines = _joined('{"doc": "', docs, '", "text": "', texts, '"}\n')
            file.write(memoryview(lines.cast(pa.binary()).combine_chunks().buffers()[2]))


def _columns(num_rows: int) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray]]:
    for start in range(0, num_rows, GROUP_ROWS):
        numbers = np.arange(start, min(start + GROUP_ROWS, num_rows))
        row = pa.chunked_array([numbers]).cast(pa.string())
        count = pa.chunked_array([numbers * 7919 % 100_003]).cast(pa.string())
        yield (
            _joined("d", row),
            _joined(
                "Bill ", row, ": ", count, " bolts at 0.12 and 7 hinges at 3.45; what is the total?"
            ),
        )


def _joined(*parts: pa.ChunkedArray | str) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(*parts, "")


class EchoEngine:
    """Says the prompt again: its first half as reasoning, `end_id`, its second half as content.

    It takes as little time as it can, since it stands for the work of a model.
    """

    def __init__(self, end_id: int, on_first: Callable[[], None] = lambda: None) -> None:
        self._end_id = end_id
        self._on_first = on_first

    def generate(self, source: PromptSource) -> Iterator[Completion]:
        """In the order of admission, `MAX_RUNNING` at a time."""
        while prompts := source.take(MAX_RUNNING, wait=True):
            self._on_first()
            for prompt in prompts:
                yield self.complete(prompt)

    def complete(self, prompt: Prompt) -> Completion:
        """The completion of one prompt."""
        ids = prompt.token_ids
        said = ids[2:-2].copy()
        said[len(said) // 2] = self._end_id
        return Completion(
            row_id=prompt.row_id,
            index=prompt.index,
            token_ids=said,
            finish_reason=FinishReason.STOP,
            prompt_tokens=len(ids),
        )

    def stats(self) -> EngineStats:
        """Nothing is counted."""
        return EngineStats()

    def close(self) -> None:
        """Nothing is held."""


class StageClock:
    """CPU time of each thread by stage; a stage within another is taken out of the outer one."""

    def __init__(self) -> None:
        self.cpu_ns: dict[str, int] = defaultdict(int)
        self._local = threading.local()
        self._switch_ns = self._cost_ns()

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` on the clock."""
        switch = self._switch

        def call(*args: Any, **kwargs: Any) -> Any:
            outer = switch(stage)
            try:
                return function(*args, **kwargs)
            finally:
                switch(outer)

        return call

    def iterated(self, stage: str, make: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
        """The same for a function that returns an iterator."""

        def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
            step = self.timed(stage, make(*args, **kwargs).__next__)
            while True:
                try:
                    item = step()
                except StopIteration:
                    return
                yield item

        return call

    def watch_job(self) -> None:
        """Puts the pipeline's classes on the clock, for the rest of this process."""
        for owner, name, stage in _STAGES:
            setattr(owner, name, self.timed(stage, getattr(owner, name)))
        for owner, name, stage in _ITERATED:
            setattr(owner, name, self.iterated(stage, getattr(owner, name)))

    def _switch(self, stage: str | None) -> str | None:
        local, now_ns = self._local, time.thread_time_ns()
        outer: str | None = getattr(local, "stage", None)
        if outer is not None:
            self.cpu_ns[outer] += max(0, now_ns - local.since_ns - self._switch_ns)
        local.stage, local.since_ns = stage, now_ns
        return outer

    def _cost_ns(self) -> int:
        """What the clock itself takes of each stretch that it measures."""
        self._switch_ns = 0
        empty = self.timed("empty", lambda: None)
        for _ in range(10_000):
            empty()
        return self.cpu_ns.pop("empty") // 10_000


_STAGES: tuple[tuple[Any, str, str], ...] = (
    (InputTable, "scan", "read"),
    (InputTable, "fingerprint", "read"),
    (InputTable, "last_rows", "read"),
    (Packer, "put", "pack"),
    (Packer, "take", "pack"),
    (Packer, "finish", "pack"),
    (Channel, "put", "queue"),
    (Channel, "get_all", "queue"),
    (Journal, "add", "journal"),
    (Journal, "flush", "journal"),
    (Writer, "advance", "write"),
    (Loop, "_put", "loop"),
    (Loop, "_keep", "loop"),
    (Loop, "_columns", "loop"),
)
_ITERATED: tuple[tuple[Any, str, str], ...] = (
    (InputTable, "rows", "read"),
    (InputTable, "carried_batches", "read again"),
    (EchoEngine, "generate", "engine"),
)


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
