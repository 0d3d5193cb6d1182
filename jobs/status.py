"""`batchmla status`: how far a job is, read from its output folder, whether or not it runs."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from batchmla.errors import JobError
from batchmla.jobs.done import DoneRows
from batchmla.jobs.journal import tally_of
from batchmla.jobs.lease import is_held
from batchmla.jobs.ledger import Ledger, Tally
from batchmla.jobs.manifest import read_manifest
from batchmla.jobs.progress import format_s, progress_path
from batchmla.jobs.remote import place_of, whole_source
from batchmla.jobs.remote_store import store_at
from batchmla.jobs.segments import BadSegment, list_segments, read_segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Counts are of finished rows on the disk; rates and engine counts are the last heartbeat's."""

    name: str
    output: str
    is_running: bool
    is_complete: bool  # ended with exit code 0
    rows: int | None
    done: int
    failed: int
    left: int | None
    prompt_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    content_tokens: int
    parts: int
    phase: str | None = None
    heartbeat_age_s: float | None = None
    rows_per_s: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_pool_used: float | None = None  # share


def read_status(output: Path) -> Status:
    """Reads what is there; writes nothing and takes no lease."""
    output = place_of(output)
    _check_folder(output)
    manifest = read_manifest(output)
    if manifest is None:
        raise JobError(
            f"{output} is not the output folder of a job (it has no _batchmla/manifest.json); give "
            f"the job's output.path"
        )
    tally, num_parts = _finished(output, manifest.job_id)
    beat, is_running = _heartbeat(output), is_held(output)
    num_rows = manifest.num_rows if manifest.num_rows is not None else beat.get("rows")
    is_complete = (output / "_SUCCESS").exists()
    if num_rows is None and is_complete:
        num_rows = tally.rows
    left = None if num_rows is None else num_rows - tally.rows
    live = beat if is_running else {}
    rows_per_s, has_eta = live.get("rows_per_s"), live.get("eta_s") is not None
    return Status(
        name=str(manifest.job.get("name", {}).get("value", "?")),
        output=str(output),
        is_running=is_running,
        is_complete=is_complete,
        rows=num_rows,
        done=tally.rows,
        failed=tally.failed,
        left=left,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        reasoning_tokens=tally.reasoning_tokens,
        content_tokens=tally.content_tokens,
        parts=num_parts,
        phase=live.get("phase"),
        heartbeat_age_s=max(0.0, time.time() - beat["at_s"]) if beat else None,
        rows_per_s=rows_per_s,
        tokens_per_s=live.get("tokens_per_s"),
        eta_s=left / rows_per_s if has_eta and rows_per_s and left is not None else None,
        running=live.get("running"),
        waiting=live.get("waiting"),
        kv_pool_used=live["used_pages"] / live["total_pages"] if live.get("total_pages") else None,
    )


def _check_folder(output: Path) -> None:
    """Refuses what is no folder, above all the job file itself."""
    try:
        is_folder, exists = output.is_dir(), output.exists()
    except OSError as error:
        raise JobError(f"{str(output)[:120]} cannot be read ({error.strerror})") from error
    if not exists:
        raise JobError(f"{output} does not exist; give the output.path of a job that was begun")
    if not is_folder:
        raise JobError(
            f"{output} is a file; status takes the job's output folder: give its output.path"
        )


def print_status(status: Status, console: Console | None = None) -> None:
    """A small table."""
    table = Table(title=f"{status.name} · {status.output}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _lines(status):
        table.add_row(name, value)
    (console or Console()).print(table)


def _lines(status: Status) -> list[tuple[str, str]]:
    total = "?" if status.rows is None else f"{status.rows:,}"
    left = "?" if status.left is None else f"{status.left:,}"
    generated = status.reasoning_tokens + status.content_tokens
    lines = [
        ("state", _state(status)),
        ("rows", f"{status.done:,} of {total} done, {status.failed:,} failed, {left} left"),
        ("tokens", f"{status.prompt_tokens:,} prompt ({status.cached_tokens:,} cached), "
                   f"{generated:,} generated ({status.reasoning_tokens:,} reasoning)"),
        ("parts", f"{status.parts:,}"),
    ]  # fmt: skip
    if status.tokens_per_s is not None and status.rows_per_s is not None:
        lines.append(
            ("rate", f"{status.tokens_per_s:,.0f} tokens/s, {status.rows_per_s:,.1f} rows/s")
        )
    if status.running is not None:
        pool = "" if status.kv_pool_used is None else f", KV pool {status.kv_pool_used:.0%}"
        lines.append(("engine", f"{status.running} running, {status.waiting} waiting{pool}"))
    if status.eta_s is not None:
        lines.append(("left", f"about {format_s(status.eta_s)}"))
    return lines


def _state(status: Status) -> str:
    if status.is_running:
        age = "" if status.heartbeat_age_s is None else f", seen {status.heartbeat_age_s:.0f} s ago"
        return f"running ({status.phase or 'starting'}{age})"
    if status.is_complete:
        return "complete"
    return "not running; the same command goes on with it"


def _finished(output: Path, job_id: str) -> tuple[Tally, int]:
    """Sums over published parts and over the segments of rows that no part holds."""
    tally, done, num_parts = Tally(), DoneRows(), 0
    for part in Ledger(store_at(output)).present():
        done.mark_range(part.start, part.stop)
        tally.add(part.tally)
        num_parts += 1
    for segment in list_segments(output / "_batchmla" / "segments"):
        try:
            schema = pq.read_schema(whole_source(segment.path)).remove_metadata()
            table = read_segment(segment, schema, job_id)
        except (BadSegment, JobError, OSError, pa.ArrowException):
            continue  # the run says so, and does its rows again; it may also have gone meanwhile
        tally.add(tally_of(table, done.mark(table.column("index").to_numpy())))
    return tally, num_parts


def _heartbeat(output: Path) -> dict[str, Any]:
    try:
        beat = json.loads(progress_path(output).read_bytes())
        return beat if isinstance(beat, dict) else {}
    except (OSError, ValueError):
        return {}
