"""Everything a report says, read from an output folder: writes nothing, takes no lease."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from batchmla.errors import JobError
from batchmla.jobs.manifest import Manifest, read_manifest
from batchmla.jobs.report_counts import FinishedRows, count_finished
from batchmla.jobs.series import Sample, read_series
from batchmla.jobs.status import Status, read_status
from batchmla.jobs.summary import Summary, read_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One run of the job, as far as the series has it."""

    began: str
    wall_s: float
    rows: int  # done in it
    generated_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A field of the job: its value, where that came from, and what `auto` or null became."""

    name: str
    value: Any
    source: str
    became: Any = None
    became_source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Read at about one moment; a job that runs may have gone on between two of the fields."""

    made: str
    status: Status
    manifest: Manifest
    summary: Summary | None  # of the last run that ended in order
    samples: Sequence[Sample]
    runs: Sequence[RunLine]
    counts: FinishedRows
    settings: Sequence[Setting]
    engine: Mapping[str, Any]  # facts that are no field of the job
    notes: Sequence[str]


def read_report(output: Path) -> ReportData:
    """Reads all of it. Raises a `JobError` where there is no job's output."""
    status = read_status(output)
    manifest = read_manifest(output)
    if manifest is None:
        raise JobError(f"{output} was emptied while it was read; try again")
    summary, samples = read_summary(output), read_series(output)
    effective = dict(summary.effective) if summary is not None else {}
    settings = _settings(manifest, effective)
    named = {each.name for each in settings}
    raw_notes = effective.pop("notes", [])
    return ReportData(
        made=_when(time.time()),
        status=status,
        manifest=manifest,
        summary=summary,
        samples=samples,
        runs=_runs(samples),
        counts=count_finished(output, manifest),
        settings=settings,
        engine={name: _plain(value) for name, value in effective.items() if name not in named},
        notes=[str(note) for note in raw_notes] if isinstance(raw_notes, list) else [],
    )


def _settings(manifest: Manifest, effective: Mapping[str, Any]) -> list[Setting]:
    found = []
    for name, each in manifest.job.items():
        value, source = each.get("value"), str(each.get("source", "?"))
        given = effective.get(name)
        became = _plain(given)
        if became is None or became == value:
            found.append(Setting(name=name, value=value, source=source))
            continue
        made_by = given.get("source") if isinstance(given, dict) else None
        found.append(
            Setting(name=name, value=value, source=source, became=became, became_source=made_by)
        )
    return found


def _plain(value: Any) -> Any:
    """The value of an effective setting, which may stand with its source."""
    return value["value"] if isinstance(value, dict) and "value" in value else value


def _runs(samples: Sequence[Sample]) -> list[RunLine]:
    """Runs in order. The rows done in one are those beyond the last sample of the run before."""
    found, before = [], 0
    for run_s, group in groupby(samples, key=lambda sample: sample.run_s):
        run = list(group)
        found.append(
            RunLine(
                began=_when(run_s),
                wall_s=run[-1].elapsed_s,
                rows=max(0, run[-1].done - before),
                generated_tokens=run[-1].generated_tokens,
                preemptions=run[-1].preemptions,
            )
        )
        before = run[-1].done
    return found


def _when(at_s: float) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "?"
