"""What a run ends with: printed as JSON by `run --json`, kept as `_batchmla/summary.json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchmla.core import EngineStats
from batchmla.errors import ExitCode
from batchmla.jobs.ledger import Tally
from batchmla.jobs.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Counts are over the whole output; seconds, rates and preemptions are those of this run.

    `rows` is None while the end of the input has not been seen. `settings` maps each field of the
    job to its value and its source; values that `auto` became are under `effective`.
    """

    output: str
    exit_code: int
    rows: int | None
    done: int
    failed: int
    left: int | None
    prompt_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    content_tokens: int
    generated_tokens: int  # by this run's engine, marker and forced tokens included
    engine_seconds: float
    wall_seconds: float
    tokens_per_second: float | None  # generated, over engine_seconds
    rows_this_run: int
    preemptions: int
    engine_steps: int
    duplicates: int  # rows that two segments held; one was taken
    deduped: int = 0  # rows of this run that took the completion of an equal greedy prompt
    reason: str | None = None  # why the job did not end with exit code 0
    step_downs: int = 0  # steps that ran out of memory and were made smaller
    memory: Mapping[str, Any] = field(default_factory=dict)  # of one device: estimated, measured
    expert_load: Mapping[str, Any] | None = None  # of experts dealt to ranks: see `ExpertLoad`
    calibration: Mapping[str, Any] = field(default_factory=dict)  # times of steps, for `plan`
    effective: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        total = "?" if self.rows is None else f"{self.rows:,}"
        found = [f"{self.done:,} of {total} rows done, {self.failed:,} failed → {self.output}"]
        if self.rows_this_run:
            rate = f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second else ""
            found.append(
                f"this run: {self.rows_this_run:,} rows, {self.generated_tokens:,} generated "
                f"tokens in {self.engine_seconds:.1f} s{rate}, {self.preemptions:,} preemptions"
            )
        if self.step_downs:
            found.append(
                f"{self.step_downs:,} steps ran out of memory and were made smaller; lower "
                "model.memory_utilization or engine.max_batched_tokens"
            )
        if self.deduped:
            found.append(f"{self.deduped:,} of them took the completion of an equal greedy prompt")
        if self.reason:
            found.append(self.reason)
        return found


def summary_path(output: Path) -> Path:
    return output / "_batchmla" / "summary.json"


def make_summary(
    *,
    output: Path,
    exit_code: ExitCode,
    num_rows: int | None,
    tally: Tally,
    stats: EngineStats,
    engine_s: float,
    wall_s: float,
    rows_this_run: int,
    duplicates: int,
    reason: str | None,
    effective: Mapping[str, Any],
    settings: Mapping[str, Any],
    deduped: int = 0,
    calibration: Mapping[str, Any] | None = None,
) -> Summary:
    """Puts the sums together."""
    rate = stats.generated_tokens / engine_s if engine_s > 0 and stats.generated_tokens else None
    return Summary(
        output=str(output),
        exit_code=int(exit_code),
        rows=num_rows,
        done=tally.rows,
        failed=tally.failed,
        left=None if num_rows is None else num_rows - tally.rows,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        reasoning_tokens=tally.reasoning_tokens,
        content_tokens=tally.content_tokens,
        generated_tokens=stats.generated_tokens,
        engine_seconds=round(engine_s, 3),
        wall_seconds=round(wall_s, 3),
        tokens_per_second=None if rate is None else round(rate, 1),
        rows_this_run=rows_this_run,
        preemptions=stats.preemptions,
        engine_steps=stats.steps,
        duplicates=duplicates,
        deduped=deduped,
        step_downs=stats.step_downs,
        expert_load=None if stats.expert_load is None else asdict(stats.expert_load),
        memory=_memory(effective.get("memory_bytes"), stats.peak_bytes),
        calibration=dict(calibration or {}),
        reason=reason,
        effective={name: value for name, value in effective.items() if name != "memory_bytes"},
        settings=dict(settings),
    )


def _memory(estimated: Mapping[str, int] | None, peak_bytes: int) -> dict[str, Any]:
    """What the plan gave the engine on one device, and what it took at most, in bytes."""
    if estimated is None:
        return {}
    return {
        "estimated": {**estimated, "total": sum(estimated.values())},
        "measured": peak_bytes or None,
    }


def stopped_early(output: Path, tally: Tally, signum: int) -> Summary:
    """A signal came before the loop: this run did nothing."""
    return make_summary(
        output=output,
        exit_code=ExitCode(128 + signum),
        num_rows=None,
        tally=tally,
        stats=EngineStats(),
        engine_s=0.0,
        wall_s=0.0,
        rows_this_run=0,
        duplicates=0,
        reason="stopped by a signal before the first row",
        effective={},
        settings={},
    )


def read_summary(output: Path) -> Summary | None:
    """The summary of the last run in `output`, None when there is none that can be read."""
    try:
        return Summary(**json.loads(summary_path(output).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def write_summary(store: Store, summary: Summary) -> None:
    store.write(summary_path(store.root), json.dumps(summary.as_dict(), indent=1).encode())
