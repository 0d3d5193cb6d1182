"""Two replicas on Ray beside one, each with one thread, and beside one engine without Ray.

    python benchmarks/replicas.py                        # 3 rounds over 600 documents
    python benchmarks/replicas.py --rows 40 --rounds 1   # does it run?

Held-out documents through builtin:tally in exact mode, so that all runs generate the same tokens.
The kinds run in turns, in another order each round, each run a process of its own with a Ray of its
own; generated tokens/s are those of the run's summary, from the first replica that is ready to the
last row. The ratio is that of medians. On two cores all of it takes about a quarter of an hour.
Results go to benchmarks/results/replicas.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "out" / "replicas"
RESULTS = ROOT / "benchmarks" / "results" / "replicas.json"
EXECUTORS: dict[str, dict[str, Any]] = {
    "local": {"kind": "local"},
    "one": {"kind": "ray", "replicas": 1, "address": "local"},
    "two": {"kind": "ray", "replicas": 2, "address": "local"},
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # threads of an engine, in a replica too


def write_documents(num_rows: int) -> Path:
    path = OUT / f"documents-{num_rows}.parquet"
    words = ["-m", "examples.tally.make_data", "--out", str(path), "--rows", str(num_rows)]
    subprocess.run([sys.executable, *words, "--seed", "1"], cwd=ROOT, check=True)
    return path


def run(kind: str, documents: Path, max_tokens: int) -> dict[str, Any]:
    """The summary of one run."""
    job = {
        "model": {"path": "builtin:tally", "device": "cpu"},
        "input": {"path": str(documents), "id": "doc_id"},
        "prompt": {"user": "{{ document }}"},
        "sampling": {"temperature": 0, "max_tokens": max_tokens},
        "engine": {"deterministic": True, "max_num_seqs": 32},
        "executor": EXECUTORS[kind],
        "output": {"path": str(OUT / kind)},
    }
    path = OUT / f"{kind}.yaml"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-P", "-m", "batchmla", "run", str(path), "--fresh", "--json"]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return {
        "tokens_per_s": found["tokens_per_second"],
        "generated_tokens": found["generated_tokens"],
        "engine_s": found["engine_seconds"],
        "wall_s": found["wall_seconds"],
    }


def answers(kind: str) -> list[str]:
    table = pq.read_table(OUT / kind, columns=["content"])
    return table.column("content").to_pylist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    documents = write_documents(options.rows)
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in EXECUTORS}
    for number in range(options.rounds):
        order = list(EXECUTORS) if number % 2 == 0 else list(reversed(EXECUTORS))
        for kind in order:
            runs[kind].append(run(kind, documents, options.max_tokens))
            print(f"round {number + 1}, {kind}: {runs[kind][-1]}", flush=True)
    assert answers("local") == answers("one") == answers("two"), "exact mode gives the same rows"
    medians = {
        kind: statistics.median(each["tokens_per_s"] for each in found)
        for kind, found in runs.items()
    }
    result = {
        "rows": options.rows,
        "versions": {name: version(name) for name in ("batchmla", "torch", "ray")},
        "cores": len(os.sched_getaffinity(0)),
        "tokens_per_s": medians,
        "two_over_one": round(medians["two"] / medians["one"], 3),
        "one_over_local": round(medians["one"] / medians["local"], 3),
        "runs": runs,
    }
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("tokens_per_s", "two_over_one")}))


if __name__ == "__main__":
    main()
