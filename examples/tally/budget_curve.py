"""Exact answers by thinking budget, each point a job of its own, as a picture.

    python examples/tally/budget_curve.py --rows 300

Runs examples/tally/job.yaml once a budget over the same held-out documents, with
`reasoning.budget` set, and draws examples/tally/budget.png.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import matplotlib
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("examples/tally")
DOCUMENTS = FOLDER / "out" / "curve.parquet"
PICTURE = FOLDER / "budget.png"
BUDGETS = (0, 32, 64, 128, 192, 256, 384)


def run(*words: str) -> None:
    """One command at the project's root; its failure is ours."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def share_right(budget: int) -> tuple[float, float]:
    """(share of exact answers, mean reasoning tokens) of one job."""
    out = FOLDER / "out" / f"budget-{budget}"
    settings = (f"input.path={DOCUMENTS}", f"output.path={out}", f"reasoning.budget={budget}")
    sets = [word for setting in settings for word in ("--set", setting)]
    run("-m", "batchmla", "run", str(FOLDER / "job.yaml"), "--fresh", *sets)
    rows = pq.read_table(ROOT / out).to_pylist()
    assert all(row["reasoning_tokens"] <= budget for row in rows), "a row exceeds its budget"
    right = sum(row["content"] == row["expected"] for row in rows)
    return right / len(rows), sum(row["reasoning_tokens"] for row in rows) / len(rows)


def draw(points: list[tuple[int, float]], num_rows: int) -> None:
    """The curve."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), dpi=120)
    axes.plot(*zip(*((budget, 100 * share) for budget, share in points), strict=True), marker="o")
    axes.set(
        xlabel="reasoning.budget (tokens)",
        ylabel="exact answers (%)",
        ylim=(0, 103),
        title=f"builtin:tally, {num_rows} held-out documents a point",
    )
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(ROOT / PICTURE, metadata={"Software": None})


def main() -> None:
    """All budgets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    data = ("--out", str(DOCUMENTS), "--rows", str(options.rows), "--seed", str(options.seed))
    run("-m", "examples.tally.make_data", *data)
    points = []
    for budget in BUDGETS:
        share, mean_tokens = share_right(budget)
        points.append((budget, share))
        print(f"budget {budget}: {share:.1%} exact, {mean_tokens:.0f} reasoning tokens", flush=True)
    draw(points, options.rows)
    print(f"drawn to {PICTURE}")


if __name__ == "__main__":
    main()
