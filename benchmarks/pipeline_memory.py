"""Peak memory and time of the pipeline between a small and a large number of short rows.

    python benchmarks/pipeline_memory.py                 (10 thousand and 1 million rows)
    python benchmarks/pipeline_memory.py 10000 200000 --json

The engine is the tests' scripted one; reader, packer, journal and writer are the real ones, over
Parquet files in a temporary folder, with ids in a column, so that repeats are looked for. Each job
runs in a process of its own. The promise: less than 20 bytes a row plus 50 MB.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from scripted import ScriptedEngine, run_scripted, scripted_seams, scripted_spec

from batchmla.jobs.read import open_input

BATCH_ROWS = 10_000
BYTES_PER_ROW = 20
FIXED_BYTES = 50_000_000


def write_input(path: Path, num_rows: int) -> None:
    """Rows doc, text of about 20 characters, without holding them all."""
    schema = pa.schema([("doc", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema) as file:
        for start in range(0, num_rows, BATCH_ROWS):
            numbers = range(start, min(start + BATCH_ROWS, num_rows))
            docs = [f"d{i}" for i in numbers]
            texts = [f"text {i * 7919 % 100_003} of row {i}" for i in numbers]
            file.write_table(pa.table({"doc": docs, "text": texts}, schema=schema))


def run(folder: Path, num_rows: int, connection: Connection) -> None:
    """One job in this process; sends its figures."""
    write_input(folder / "in.parquet", num_rows)
    before_bytes = peak_bytes()
    loaded = scripted_spec(
        folder / "in.parquet",
        folder / "out",
        input={"id": "doc"},
        engine={"window_rows": 5000},
        output={"rows_per_file": 10_000},
    )
    started_s = time.monotonic()
    seams = replace(
        scripted_seams(ScriptedEngine(max_running=256, remembers=False)),
        table=lambda spec: open_input(spec.input),
    )
    summary = run_scripted(loaded, seams)
    assert summary.exit_code == 0 and summary.done == num_rows, summary
    connection.send(
        {
            "rows": num_rows,
            "peak_bytes": peak_bytes(),
            "before_bytes": before_bytes,
            "seconds": round(time.monotonic() - started_s, 2),
            "cpu_seconds": round(time.process_time(), 2),
        }
    )


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(num_rows: int) -> dict[str, float]:
    """The figures of one job."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=run, args=(Path(folder), num_rows, sender))
        process.start()
        sender.close()
        figures: dict[str, float] = receiver.recv()
        process.join()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=int, nargs="*", default=[10_000, 1_000_000])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    small, large = (measure(num_rows) for num_rows in options.rows)
    grown_bytes = large["peak_bytes"] - small["peak_bytes"]
    allowed_bytes = BYTES_PER_ROW * (large["rows"] - small["rows"]) + FIXED_BYTES
    found = {
        "small": small,
        "large": large,
        "grown_bytes": grown_bytes,
        "allowed_bytes": allowed_bytes,
        "us_per_row": round(1e6 * large["cpu_seconds"] / large["rows"], 1),
    }
    if options.json:
        print(json.dumps(found))
    else:
        for figures in (small, large):
            print(
                f"{figures['rows']:>9,} rows: peak {figures['peak_bytes'] / 1e6:.0f} MB, "
                f"{figures['seconds']:.1f} s, {figures['cpu_seconds']:.1f} s of processor"
            )
        print(f"grown by {grown_bytes / 1e6:.1f} MB, allowed {allowed_bytes / 1e6:.1f} MB")
        print(f"{found['us_per_row']} us of processor a row")
    sys.exit(grown_bytes >= allowed_bytes)


if __name__ == "__main__":
    main()
