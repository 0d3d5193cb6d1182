"""An engine and a text side without a model: an answer is a function of its prompt's ids."""

import heapq
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchmla.core import (
    Completion,
    EngineStats,
    FinishReason,
    Prompt,
    PromptSource,
    SamplingParams,
)
from batchmla.errors import JobError
from batchmla.jobs.journal import Pace
from batchmla.jobs.row import Row
from batchmla.jobs.rowtext import Answer
from batchmla.jobs.run import run_job
from batchmla.jobs.seams import LoadedEngine, Seams
from batchmla.jobs.spec import LoadedSpec, build_spec
from batchmla.jobs.store import Store
from batchmla.jobs.summary import Summary

END_ID = 7  # closes the reasoning
POISON_ID = 666  # a prompt that holds it fails in the engine


def answer_ids(prompt_ids: np.ndarray) -> np.ndarray:
    """Reasoning, `END_ID`, content: 3 to 34 ids."""
    seed = zlib.crc32(prompt_ids.tobytes())
    num_reasoning, num_content = 1 + seed % 16, 1 + (seed >> 8) % 16
    ids = (seed + 31 * np.arange(num_reasoning + num_content + 1)) % 900 + 100
    ids[num_reasoning] = END_ID
    return ids.astype(np.int32)


class ScriptedEngine:
    """Holds up to `max_running` prompts, finishes them out of order.

    A step takes `delay_s` and finishes a sixteenth of what runs.
    """

    def __init__(
        self,
        *,
        max_running: int = 64,
        delay_s: float = 0.0,
        fail_after: int | None = None,
        error: Exception | None = None,
        on_completion: Callable[[int], None] | None = None,
        remembers: bool = True,
    ) -> None:
        self._max_running = max_running
        self._delay_s = delay_s
        self._fail_after = fail_after
        self._error = error or RuntimeError("the scripted engine broke")
        self._on_completion = on_completion
        self._remembers = remembers
        self._running: list[tuple[int, int, Prompt]] = []
        self.num_done = 0
        self.num_generated = 0
        self.num_prompt_tokens = 0
        self.seen: list[int] = []  # indices as admitted
        self.finished: list[int] = []  # and as completed
        self.expected: list[int | None] = []
        self.is_closed = False

    def generate(self, source: PromptSource) -> Iterator[Completion]:
        admitted = 0
        while True:
            room = self._max_running - len(self._running)
            for prompt in source.take(room, wait=not self._running):
                ends = admitted + zlib.crc32(prompt.token_ids.tobytes()) % 50
                heapq.heappush(self._running, (ends, prompt.index, prompt))
                admitted += 1
                if self._remembers:
                    self.seen.append(prompt.index)
                    self.expected.append(prompt.expected_tokens)
                self.num_prompt_tokens += len(prompt.token_ids)
            if not self._running:
                return
            if self._delay_s:
                time.sleep(self._delay_s)
            for _ in range(1 + len(self._running) // 16):
                yield self._complete(heapq.heappop(self._running)[2])

    def _complete(self, prompt: Prompt) -> Completion:
        if self._fail_after is not None and self.num_done >= self._fail_after:
            raise self._error
        self.num_done += 1
        if self._remembers:
            self.finished.append(prompt.index)
        if self._on_completion is not None:
            self._on_completion(self.num_done)
        is_poison = POISON_ID in prompt.token_ids
        ids = np.zeros(0, np.int32) if is_poison else answer_ids(prompt.token_ids)
        self.num_generated += len(ids)
        return Completion(
            row_id=prompt.row_id,
            index=prompt.index,
            token_ids=ids,
            finish_reason=FinishReason.ERROR if is_poison else FinishReason.STOP,
            prompt_tokens=len(prompt.token_ids),
            cached_tokens=len(prompt.token_ids) // 4,
            error="poison in the prompt" if is_poison else None,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            used_pages=len(self._running),
            total_pages=self._max_running,
            prompt_tokens=self.num_prompt_tokens,
            generated_tokens=self.num_generated,
        )

    def close(self) -> None:
        self.is_closed = True


PARAMS = SamplingParams(max_tokens=64, stop_ids=frozenset((0,)))  # it may end earlier


class ScriptedText:
    """Prompts are the bytes of the column `text`; a row with text "bad" has no prompt."""

    def __init__(self, *, prompt_hash: str = "scripted", poison: str = "poison") -> None:
        self.prompt_hash = prompt_hash
        self.model_files: Mapping[str, str] = {"config.json": "scripted"}
        self._poison = poison

    columns = ("text",)
    effective: Mapping[str, Any] = {}

    def prompts(self, rows: Sequence[Row]) -> Sequence[Prompt | str]:
        return [self._prompt(row) for row in rows]

    def _prompt(self, row: Row) -> Prompt | str:
        if row.error is not None:
            return row.error
        text = str(row.values["text"])
        if text == "bad":
            return "column text is bad"
        ids = self.ids(text)
        if text == self._poison:
            ids = np.array([POISON_ID], np.int32)
        return Prompt(row_id=row.id, index=row.index, params=PARAMS, token_ids=ids)

    @staticmethod
    def ids(text: str) -> np.ndarray:
        """One for each byte."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def answer(self, prompt: Prompt, completion: Completion) -> Answer:
        ids = completion.token_ids
        cut = int(np.flatnonzero(ids == END_ID)[0])
        return Answer(
            reasoning=" ".join(map(str, ids[:cut].tolist())),
            content=" ".join(map(str, ids[cut + 1 :].tolist())),
            finish_reason=str(completion.finish_reason),
            reasoning_state="closed",
            reasoning_tokens=cut,
            content_tokens=len(ids) - cut - 1,
        )


@dataclass(frozen=True)
class ScriptedScan:
    num_rows: int | None


class ScriptedTable:
    """One Parquet file with the columns `doc` and `text`."""

    def __init__(self, path: Path, *, knows_rows: bool = True, faulty: int | None = None) -> None:
        self._path = path
        self._knows_rows = knows_rows
        self._faulty = faulty
        self.carried = pq.read_schema(path)

    def scan(self, mode: str) -> ScriptedScan:
        return ScriptedScan(pq.read_metadata(self._path).num_rows if self._knows_rows else None)

    def rows(
        self, start: int, limit: int | None, columns: Sequence[str] | None = None
    ) -> Iterator[list[Row]]:
        for batch, first in self._batches(start):
            names, texts = batch.column("doc").to_pylist(), batch.column("text").to_pylist()
            rows = []
            for offset, (name, text) in enumerate(zip(names, texts, strict=True)):
                index = first + offset
                if self._faulty is not None and index >= self._faulty:
                    yield rows
                    raise JobError(f"{self._path} row {index}: malformed")
                if limit is not None and index >= start + limit:
                    break
                rows.append(
                    Row(index=index, file=0, number=index, id=name, typed_id=name,
                        values={"text": text})
                )  # fmt: skip
            if rows:
                yield rows
            if limit is not None and first + batch.num_rows >= start + limit:
                return

    def carried_batches(self, start: int) -> Iterator[pa.RecordBatch]:
        for batch, _ in self._batches(start):
            yield batch

    def _batches(self, start: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        first = 0
        for batch in pq.ParquetFile(self._path, pre_buffer=False).iter_batches(1000):
            if first + batch.num_rows > start:
                skipped = max(0, start - first)
                yield batch.slice(skipped), first + skipped
            first += batch.num_rows

    def fingerprint(self) -> Mapping[str, str]:
        stat = os.stat(self._path)
        return {self._path.name: f"file 1, {stat.st_size} bytes, at {stat.st_mtime_ns}"}

    def last_rows(self) -> str | None:
        return None

    def has_grown(self, name: str, was: str, was_rows: str | None) -> bool:
        return False


def write_rows(path: Path, texts: Sequence[str]) -> Path:
    """An input file with the rows doc = "d<i>", text."""
    table = pa.table(
        {"doc": [f"d{i}" for i in range(len(texts))], "text": pa.array(texts, pa.string())}
    )
    pq.write_table(table, path)
    return path


def sample_texts(count: int) -> list[str]:
    return [f"text {i * i % 977} of row {i}" + " and more" * (i % 5) for i in range(count)]


def scripted_spec(source: Path, output: Path, /, **sections: Any) -> LoadedSpec:
    """A job over `source`; keyword arguments are sections of the job file."""
    values: dict[str, Any] = {
        "model": {"path": "scripted"},
        "input": {"path": str(source)},
        "prompt": {"user": "{{ text }}"},
        "output": {"path": str(output), "rows_per_file": 100},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return build_spec(values)


def scripted_seams(
    engine: ScriptedEngine | None = None,
    *,
    text: ScriptedText | None = None,
    knows_rows: bool = True,
    faulty: int | None = None,
    store: Callable[[Path], Store] = Store,
    pace: Pace | None = None,
) -> Seams:
    """`engine` None: a job that must not load one."""

    def load(_: Any) -> LoadedEngine:
        assert engine is not None, "the engine was loaded"
        return LoadedEngine(engine=engine, effective={"max_num_seqs": 64})

    return Seams(
        store=store,
        table=lambda spec: ScriptedTable(
            Path(str(spec.input.path)), knows_rows=knows_rows, faulty=faulty
        ),
        text=lambda spec, table: text or ScriptedText(),
        engine=load,
        pace=pace or Pace(),
    )


def run_scripted(loaded: LoadedSpec, seams: Seams, **wishes: Any) -> Summary:
    return run_job(loaded, progress="off", seams=seams, **wishes)
