"""The main job from end to end: held-out purchase documents in, reasoning and answers out.

    python examples/tally/demo.py            (make demo sets everything up first)

Writes examples/tally/out/documents.parquet, runs examples/tally/job.yaml over it, and compares the
column `content` with the column `expected` that the documents carry.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("examples/tally")
DOCUMENTS = FOLDER / "out" / "documents.parquet"
ANSWERS = FOLDER / "out" / "answers"


def run(*words: str) -> None:
    """One command, shown and run at the project's root; its failure is ours."""
    print("$", *words, flush=True)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def show(answers: Path, num_shown: int) -> float:
    """Prints a few rows and returns the share of exact answers."""
    rows = pq.read_table(answers).to_pylist()
    right = sum(row["content"] == row["expected"] for row in rows)
    table = Table("document", "reasoning", "content", "expected", show_lines=True)
    for row in rows[:num_shown]:
        cells = (row["document"], row["reasoning"], row["content"], row["expected"])
        table.add_row(*(Text(cell or "") for cell in cells))
    console = Console()
    console.print(table)
    tokens = sum(row["reasoning_tokens"] + row["content_tokens"] for row in rows)
    console.print(f"{len(rows)} documents, {tokens:,} generated tokens")
    console.print(f"exact answers: {right} of {len(rows)} ({right / len(rows):.1%})")
    console.print(f"output: {answers} (read it with pandas, pyarrow, Polars or DuckDB)")
    return right / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    data = ("--out", str(DOCUMENTS), "--rows", str(options.rows), "--seed", str(options.seed))
    run("-m", "examples.tally.make_data", *data)
    job = str(FOLDER / "job.yaml")
    run("-m", "batchmla", "plan", job)
    run("-m", "batchmla", "run", job, "--fresh")
    show(ROOT / ANSWERS, num_shown=3)


if __name__ == "__main__":
    main()
