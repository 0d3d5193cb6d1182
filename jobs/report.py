"""`batchmla report`: one HTML file about a job, whole in itself, whether or not the job runs.

It holds no script, loads nothing, and treats every text of the job as text.
"""

import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from batchmla.errors import JobError, StorageError
from batchmla.jobs.figure import check_library
from batchmla.jobs.progress import format_s
from batchmla.jobs.remote import RemotePath, place_of
from batchmla.jobs.remote_store import RemoteStore
from batchmla.jobs.report_counts import Lengths, setting
from batchmla.jobs.report_data import ReportData, read_report
from batchmla.jobs.report_path import report_path
from batchmla.jobs.report_plots import (
    Timeline,
    lengths_plot,
    pool_plot,
    rows_plot,
    step_plot,
    throughput_plot,
)

_MOST_ERRORS = 40
_MOST_VALUE_CHARS = 2000
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Something drawn, with the words above it."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsView:
    """Lengths with their histogram, None where no row has any."""

    title: str
    lengths: Lengths
    svg: str | None


def write_report(output: Path, file: Path | None = None) -> Path:
    """Reads the output folder and writes the report; returns where it lies.

    Raises a `JobError` for what is no output folder or no place for a file, or without matplotlib;
    a `StorageError` when the file cannot be written.
    """
    check_library("batchmla report")
    output, file = place_of(output), None if file is None else place_of(file)
    if file is not None and not isinstance(file, RemotePath):
        _check_place(file)
    html = render(read_report(output))
    file = report_path(output) if file is None else file
    _write(file, html.encode("utf-8"))
    return file


def render(data: ReportData) -> str:
    """The page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "number": lambda value: f"{value:,}",
        "percent": lambda share: f"{100 * share:.1f} %",
        "seconds": format_s,
        "text": _text,
        "value": _value,
    }
    source = files("batchmla.jobs").joinpath("report.html.jinja").read_text(encoding="utf-8")
    counts, num_rows = data.counts, data.status.rows
    kinds = sorted(counts.errors.values(), key=lambda kind: -kind.rows)
    shown, hidden = kinds[:_MOST_ERRORS], kinds[_MOST_ERRORS:]
    num_samples = setting(data.manifest, "sampling.n")
    return environment.from_string(source).render(
        data=data,
        state=_state(data),
        left=None if num_rows is None else max(0, num_rows - counts.tally.rows),
        plots=_plots(data),
        lengths=_lengths(data),
        errors=shown,
        errors_left=counts.other_errors + sum(kind.rows for kind in hidden),
        model=setting(data.manifest, "model.path"),
        samples_each=num_samples if isinstance(num_samples, int) else 1,
        samples_column=setting(data.manifest, "sampling.n.column"),
        summary_facts=_summary_facts(data),
        fact_of=_fact,
    )


def _state(data: ReportData) -> str:
    status = data.status
    if status.is_running:
        eta = "" if status.eta_s is None else f", about {format_s(status.eta_s)} left"
        return f"running ({status.phase or 'starting'}{eta}); this is what is done so far"
    if status.is_complete:
        return "complete"
    return "not running and not complete; the same command goes on with it"


def _plots(data: ReportData) -> list[Plot]:
    """Over the running time of all runs; none without samples."""
    if not data.samples:
        return []
    timeline = Timeline(data.samples)
    made: list[tuple[str, str, Callable[[Timeline], str | None]]] = [
        ("Throughput", "Tokens a second, over the time since the sample before.", throughput_plot),
        ("KV pool", "Pages in use when each sample was taken.", pool_plot),
        ("Batch", "Rows that the engine works on, and rows that it could begin.", rows_plot),
        (
            "Tokens a step",
            "Mean over the steps since the sample before: decode is one token for each token "
            "generated, prefill all others, recomputed ones included.",
            step_plot,
        ),
    ]
    drawn = [(title, caption, draw(timeline)) for title, caption, draw in made]
    plots = [Plot(title=t, caption=c, svg=svg) for t, c, svg in drawn if svg is not None]
    if len(timeline.runs) > 1:
        plots[0] = Plot(
            title=plots[0].title,
            caption=f"{plots[0].caption} Dotted lines part the {len(timeline.runs)} runs; the time "
            "between them is left out.",
            svg=plots[0].svg,
        )
    return plots


def _lengths(data: ReportData) -> list[LengthsView]:
    named = {name: getattr(data.counts, name) for name in ("prompt", "reasoning", "content")}
    return [
        LengthsView(
            title=name, lengths=lengths, svg=lengths_plot(name, lengths) if lengths.rows else None
        )
        for name, lengths in named.items()
    ]


def _summary_facts(data: ReportData) -> list[tuple[str, str]]:
    """Of the last run that ended in order."""
    summary = data.summary
    if summary is None:
        return []
    rate, load = summary.tokens_per_second, summary.expert_load
    found = [
        ("last run ended with exit code", str(summary.exit_code)),
        ("its rows", f"{summary.rows_this_run:,}"),
        ("its generated tokens", f"{summary.generated_tokens:,}"),
        ("its rate", "none" if rate is None else f"{rate:,.1f} generated tokens/s"),
        ("its time in the engine", f"{summary.engine_seconds:,.1f} s"),
        ("its time in all", f"{summary.wall_seconds:,.1f} s"),
        ("its engine steps", f"{summary.engine_steps:,}"),
        ("its preemptions", f"{summary.preemptions:,}"),
        ("rows that two segments held", f"{summary.duplicates:,}"),
    ]
    if load is not None:
        found += [
            ("choices of experts by rank", ", ".join(f"{n:,}" for n in load["holder_tokens"])),
            ("its busiest rank's share of them", _times(load["busiest_holder"])),
            ("its busiest expert's", _times(load["busiest_expert"])),
        ]
    return found


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times an equal one"


def _text(value: Any) -> str:
    """What HTML can hold of it."""
    return _CONTROLS.sub("�", str(value))


def _fact(name: str, value: Any) -> str:
    """An engine's fact; bytes in binary units."""
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / (1 << 30):,.2f} GiB" if value >> 30 else f"{value / (1 << 20):,.1f} MiB"
    return _text(value) if isinstance(value, str) else _value(value)


def _value(value: Any) -> str:
    """A setting as JSON, long ones cut short."""
    words = _text(json.dumps(value, ensure_ascii=False))
    return words if len(words) <= _MOST_VALUE_CHARS else words[:_MOST_VALUE_CHARS] + "…"


def _check_place(file: Path) -> None:
    if file.is_dir():
        raise JobError(f"--out {file} is a folder; give the name of a file")
    if not file.parent.is_dir():
        raise JobError(f"--out {file}: the folder {file.parent} does not exist; make it first")


def _write(file: Path, data: bytes) -> None:
    """Replaces `file` as a whole."""
    if isinstance(file, RemotePath):
        RemoteStore(file.parent).put(file, data)
        return
    aside = file.with_name(f".{secrets.token_hex(4)}.part")
    try:
        aside.write_bytes(data)
        os.replace(aside, file)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise StorageError(
            f"{file} cannot be written ({error.strerror or error}); choose another place with "
            f"--out FILE"
        ) from error
