"""What a sweep found, as plain numbers: points, and which of them no other beats."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import ge
from typing import Any

from batchmla.bench.measure import Run, Spread
from batchmla.bench.rows import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One concurrency at one pair of lengths: medians over the runs, the most preemptions and
    memory of any. `peak_bytes` are those beyond what was in use before the model was loaded.

    `least_s` is the roofline's bound for the run, `roofline_share` that over `seconds`; None where
    rates or costs are not known. `is_pareto`: no other point of these lengths has more output
    tokens a second at no longer median latency, or as many at a shorter one.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    rows: int
    seconds: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    latency_s: Spread
    first_token_s: Spread
    between_tokens_s: Spread | None
    preemptions: int
    peak_bytes: int
    least_s: float | None
    roofline_share: float | None
    run_seconds: Sequence[float]
    is_pareto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What `bench --json` prints. Sizes in bytes, times in seconds."""

    model: str
    hardware: str
    date: str
    versions: Mapping[str, str]
    engine: Mapping[str, Any]
    planned_bytes: int
    flops_per_s: float | None
    bytes_per_s: float | None
    seed: int
    repeats: int
    points: Sequence[Point]
    notes: Sequence[str] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return asdict(self)


def make_point(runs: Sequence[Run], *, load: Load, base_bytes: int, least_s: float | None) -> Point:
    """The medians of several runs of one load; `base_bytes` were in use without the model."""
    seconds = statistics.median(run.seconds for run in runs)
    betweens = [run.between_tokens_s for run in runs if run.between_tokens_s is not None]
    return Point(
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        concurrency=load.concurrency,
        rows=load.rows,
        seconds=seconds,
        output_tokens_per_s=runs[0].output_tokens / seconds,
        prompt_tokens_per_s=runs[0].prompt_tokens / seconds,
        latency_s=_median([run.latency_s for run in runs]),
        first_token_s=_median([run.first_token_s for run in runs]),
        between_tokens_s=_median(betweens) if betweens else None,
        preemptions=max(run.preemptions for run in runs),
        peak_bytes=max(run.peak_bytes for run in runs) - base_bytes,
        least_s=least_s,
        roofline_share=None if least_s is None else least_s / seconds,
        run_seconds=[run.seconds for run in runs],
    )


def is_beaten(point: Point, others: Sequence[Point]) -> bool:
    """Whether one of `others`, of the same lengths, is as good in both and better in one."""
    mine = point.output_tokens_per_s, -point.latency_s.p50
    for other in others:
        theirs = other.output_tokens_per_s, -other.latency_s.p50
        is_alike = lengths_of(other) == lengths_of(point)
        if is_alike and theirs != mine and all(map(ge, theirs, mine)):
            return True
    return False


def lengths_of(point: Point) -> tuple[int, int]:
    """Tokens of a prompt and of its completion."""
    return point.prompt_tokens, point.output_tokens


def _median(spreads: Sequence[Spread]) -> Spread:
    return Spread(
        p50=statistics.median(each.p50 for each in spreads),
        p95=statistics.median(each.p95 for each in spreads),
    )
