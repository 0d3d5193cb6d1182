"""What the pipeline around the engine costs, by stage, and whether it stays flat with more rows.

    python benchmarks/pipeline.py                        (1e5 and 1e6 rows, Parquet and JSONL)
    python benchmarks/pipeline.py 1e7 --format parquet

Rows are short questions, templates and tokenizer those of the shipped model; the engine says every
prompt again, so that all other work is the pipeline's. Each job runs in a process of its own, over
files in a temporary folder that is removed afterwards. Printed, and written as JSON:

- rows/s and CPU time a row of a whole job, beside those of rendering, encoding and decoding the
  same rows alone; the difference is what everything else costs
- CPU time a row by stage, from a second, smaller job with a clock around every stage
- peak memory; how long the first row takes to the engine, and to it when the job goes on with all
  but 1,000 rows finished
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pipeline_parts import EchoEngine, StageClock, peak_bytes, write_input

from batchmla.jobs.local import LocalText
from batchmla.jobs.read import InputTable, open_job_input
from batchmla.jobs.run import run_job
from batchmla.jobs.seams import LoadedEngine, Seams, Table
from batchmla.jobs.spec import JobSpec, LoadedSpec, build_spec
from batchmla.jobs.store import Store
from batchmla.weights.folder import find_model

MODEL = "builtin:tally"
CONTEXT_TOKENS = 1 << 20
ALONE_ROWS = 50_000
STAGE_ROWS = 50_000
RESUMED_ROWS = 1000
BATCH_ROWS = 1024
RESULTS = Path(__file__).resolve().parent / "results" / "pipeline.json"


@dataclass
class Bench:
    """One job over `source`. `first_s`: from the start to the first row at the engine."""

    source: Path
    output: Path
    clock: StageClock | None = None
    first_s: float | None = None
    _started_s: float = field(default=0.0)
    _end_id: int = 0

    def loaded(self) -> LoadedSpec:
        """The job file, as values."""
        kind = "parquet" if self.source.suffix == ".parquet" else "jsonl"
        return build_spec(
            {
                "model": {"path": MODEL},
                "input": {"path": str(self.source), "id": "doc"},
                "prompt": {"user": "{{ text }}"},
                "output": {"path": str(self.output), "format": kind},
            }
        )

    def text(self, spec: JobSpec, table: Table) -> LocalText:
        """The real text side, with its parts on the clock."""
        assert isinstance(table, InputTable)
        folder = find_model(spec.model.path, spec.model.revision)
        text = LocalText(spec, folder, table.columns, CONTEXT_TOKENS)
        table.select(text.columns)
        (self._end_id,) = text.reasoner.end_ids
        if self.clock is not None:
            self._watch(text, self.clock)
        return text

    def _watch(self, text: Any, clock: StageClock) -> None:
        text.maker.text = clock.timed("render", text.maker.text)
        text.tokenizer.encode_batch = clock.timed("encode", text.tokenizer.encode_batch)
        text.prompts = clock.timed("prompts", text.prompts)
        text.answer = clock.timed("decode", text.answer)

    def engine(self, _: JobSpec) -> LoadedEngine:
        """The one that says prompts again."""
        return LoadedEngine(engine=EchoEngine(self._end_id, self._note_first), effective={})

    def _note_first(self) -> None:
        if self.first_s is None:
            self.first_s = time.monotonic() - self._started_s

    def run(self, limit: int | None = None) -> None:
        """To its end."""
        seams = Seams(store=Store, table=open_job_input, text=self.text, engine=self.engine)
        self._started_s = time.monotonic()
        summary = run_job(self.loaded(), limit=limit, progress="off", seams=seams)
        assert summary.exit_code == 0 and summary.failed == 0, summary


def whole(source: Path, output: Path, num_rows: int) -> dict[str, Any]:
    """A job over the first `num_rows` rows, once all that a process loads but once is there."""
    Bench(source, output.with_name("warm")).run(RESUMED_ROWS)
    before_bytes, bench = peak_bytes(), Bench(source, output)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    bench.run(num_rows)
    wall_s, cpu_s = time.monotonic() - started_s, time.process_time() - started_cpu_s
    return {
        "wall_s": round(wall_s, 2),
        "rows_per_s": round(num_rows / wall_s),
        "cpu_us_per_row": round(1e6 * cpu_s / num_rows, 1),
        "peak_bytes": peak_bytes(),
        "before_bytes": before_bytes,
    }


def first(source: Path, output: Path, num_rows: int) -> dict[str, Any]:
    """The beginning of a job, in a process that has loaded nothing."""
    bench = Bench(source, output.with_name("first"))
    bench.run(RESUMED_ROWS)
    return {"first_row_s": round(bench.first_s or 0.0, 2)}


def resumed(source: Path, output: Path, num_rows: int) -> dict[str, Any]:
    """The same job again, now without a limit."""
    bench = Bench(source, output)
    bench.run()
    return {"resume_s": round(bench.first_s or 0.0, 2)}


def stages(source: Path, output: Path, num_rows: int) -> dict[str, Any]:
    """CPU time by stage, of the threads' own work: what the tokenizer's threads do is not in it."""
    clock = StageClock()
    clock.watch_job()
    num_rows = min(num_rows, STAGE_ROWS)
    Bench(source, output, clock).run(num_rows)
    found = sorted(clock.cpu_ns.items(), key=lambda each: -each[1])
    return {stage: round(cpu_ns / 1000 / num_rows, 2) for stage, cpu_ns in found}


def alone(source: Path, output: Path, num_rows: int) -> dict[str, Any]:
    """Rendering, encoding and decoding without a pipeline around them."""
    bench = Bench(source, output)
    spec = bench.loaded().spec
    table = open_job_input(spec)
    table.scan("auto", limit_s=5.0)
    text, engine = bench.text(spec, table), EchoEngine(bench._end_id)
    cpu_s, wall_s, seen = dict.fromkeys(("render", "encode", "decode", "engine"), 0.0), 0.0, 0

    def timed(part: str, work: Callable[[], Any]) -> Any:
        nonlocal wall_s
        started_s, started_cpu_s = time.monotonic(), time.process_time()
        made = work()
        cpu_s[part] += time.process_time() - started_cpu_s
        wall_s += time.monotonic() - started_s
        return made

    for rows in table.rows(0, min(num_rows, ALONE_ROWS), text.columns):
        prompts, before_s = text.prompts(rows), wall_s
        pairs = [(prompt, engine.complete(prompt)) for prompt in prompts]
        timed("engine", lambda prompts=prompts: [engine.complete(prompt) for prompt in prompts])
        wall_s = before_s  # the engine stands for the model's work
        texts = timed("render", lambda rows=rows: [text.maker.text(row) for row in rows])
        timed("encode", lambda texts=texts: text.tokenizer.encode_batch(texts))
        timed("decode", lambda pairs=pairs: [text.answer(*pair) for pair in pairs])
        seen += len(rows)
    return {
        "rows_per_s": round(seen / wall_s),
        "cpu_us_per_row": round(1e6 * (sum(cpu_s.values()) - cpu_s["engine"]) / seen, 1),
        **{f"{part}_us": round(1e6 * each / seen, 1) for part, each in cpu_s.items()},
    }


def _send(work: Callable[..., Any], arguments: tuple[Any, ...], sender: Connection) -> None:
    sender.send(work(*arguments))


def in_process(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The figures that `work` returns, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, arguments, sender))
    process.start()
    sender.close()
    found: dict[str, Any] = receiver.recv()
    process.join()
    return found


def measure(num_rows: int, kind: str, folder: Path) -> dict[str, Any]:
    """Everything about one format and number of rows."""
    source, output = folder / f"in.{kind}", folder / "out"
    write_input(source, num_rows + RESUMED_ROWS)
    found: dict[str, Any] = {"format": kind, "rows": num_rows}
    found["alone"] = in_process(alone, source, output, num_rows)
    found["job"] = in_process(whole, source, output, num_rows)
    found["job"] |= in_process(resumed, source, output, num_rows)
    found["job"] |= in_process(first, source, output, num_rows)
    small = folder / f"small.{kind}"  # or the look at all rows would count for those few
    write_input(small, min(num_rows, STAGE_ROWS))
    found["stages_us"] = in_process(stages, small, folder / "staged", num_rows)
    job, by_itself = found["job"], found["alone"]
    found["share_of_alone"] = round(job["rows_per_s"] / by_itself["rows_per_s"], 3)
    found["other_us_per_row"] = round(job["cpu_us_per_row"] - by_itself["cpu_us_per_row"], 1)
    return found


def show(found: dict[str, Any]) -> None:
    """A paragraph for people."""
    job, by_itself = found["job"], found["alone"]
    print(
        f"{found['rows']:>12,} rows of {found['format']}\n"
        f"  {job['rows_per_s']:,} rows/s, {found['share_of_alone']:.0%} of the "
        f"{by_itself['rows_per_s']:,} of render + encode + decode alone\n"
        f"  {job['cpu_us_per_row']} us CPU a row, {by_itself['cpu_us_per_row']} of them render "
        f"{by_itself['render_us']}, encode {by_itself['encode_us']}, decode "
        f"{by_itself['decode_us']}; everything else {found['other_us_per_row']}, of which this "
        f"engine {by_itself['engine_us']}\n"
        f"  by stage: {', '.join(f'{stage} {us}' for stage, us in found['stages_us'].items())}\n"
        f"  peak {job['peak_bytes'] / 1e6:.0f} MB, {job['before_bytes'] / 1e6:.0f} before the job; "
        f"first row at the engine after {job['first_row_s']} s, on resuming after "
        f"{job['resume_s']} s",
        flush=True,
    )


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=float, nargs="*", default=[1e5, 1e6])
    parser.add_argument("--format", choices=("parquet", "jsonl"), nargs="*", dest="formats")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jobs": [],
    }
    for kind in options.formats or ("parquet", "jsonl"):
        for num_rows in map(int, options.rows):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(num_rows, kind, Path(folder))
            show(found)
            results["jobs"].append(found)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
