"""What the command line calls: texts in, a sweep out."""

from collections.abc import Sequence
from pathlib import Path

from batchmla.bench.request import Request, parse_sizes
from batchmla.bench.result import Sweep
from batchmla.bench.sweep import run_sweep
from batchmla.bench.view import check_folder
from batchmla.jobs.figure import check_library


def run_bench(
    model: str,
    *,
    concurrency: str,
    prompt_tokens: str,
    output_tokens: str,
    rows: int | None,
    repeats: int,
    seed: int,
    settings: Sequence[str],
    out: Path | None,
) -> Sweep:
    """Checks everything, `out` included, then measures. The sizes are lists such as "1,8"."""
    request = Request(
        model=model,
        concurrencies=parse_sizes("--concurrency", concurrency),
        prompt_tokens=parse_sizes("--prompt-tokens", prompt_tokens),
        output_tokens=parse_sizes("--output-tokens", output_tokens),
        rows=rows,
        repeats=repeats,
        seed=seed,
        settings=settings,
    )
    if out is not None:
        check_library("batchmla bench --out")
        check_folder(out)
    return run_sweep(request)
