"""A sweep for a person: a table, a picture of the Pareto front, a page that holds both."""

import json
import os
import secrets
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from rich import box
from rich.console import Console
from rich.table import Table

from batchmla.bench.measure import Spread
from batchmla.bench.result import Point, Sweep, lengths_of
from batchmla.errors import JobError, StorageError
from batchmla.jobs.figure import COLOURS, INK, plain_numbers, png_axes, svg_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = (
    "prompt", "output", "at once", "rows", "output tok/s", "prompt tok/s", "latency p50 / p95",
    "first token", "between tokens", "memory", "roofline", "front",
)  # fmt: skip
_SIZE_INCHES = (8.0, 4.2)
_MARGINS = {"left": 0.11, "right": 0.97, "bottom": 0.13, "top": 0.96}
_MARKERS = "osD^vP"


def cells(point: Point) -> tuple[str, ...]:
    """A point under `HEADINGS`."""
    between = point.between_tokens_s
    share = point.roofline_share
    return (
        f"{point.prompt_tokens:,}",
        f"{point.output_tokens:,}",
        f"{point.concurrency:,}",
        f"{point.rows:,}",
        f"{point.output_tokens_per_s:,.1f}",
        f"{point.prompt_tokens_per_s:,.1f}",
        _seconds(point.latency_s),
        _seconds(point.first_token_s),
        "" if between is None else _milliseconds(between),
        f"{point.peak_bytes / 2**30:,.2f} GiB",
        "" if share is None else f"{share:.0%}",
        "*" if point.is_pareto else "",
    )


def head(sweep: Sweep) -> str:
    """What was measured, where."""
    engine = sweep.engine
    return (
        f"{sweep.model} in {engine['model.dtype']} on {sweep.hardware}; medians of {sweep.repeats} "
        f"runs; planned memory {sweep.planned_bytes / 2**30:,.2f} GiB"
    )


def foot(sweep: Sweep) -> list[str]:
    """What the columns mean, and the notes."""
    lines = [
        "front *: no other concurrency has more output tokens a second at no longer latency; "
        "memory: beyond what was in use before the model was loaded",
        "latency: from entering the engine to the last token; first token, between tokens: p50 / "
        "p95 over rows",
    ]
    if sweep.flops_per_s is not None and sweep.bytes_per_s is not None:
        lines.append(
            f"roofline: least time by flops and bytes at {sweep.flops_per_s / 1e12:,.2f} TFLOP/s "
            f"and {sweep.bytes_per_s / 1e9:,.1f} GB/s, over the time taken"
        )
    return lines + [f"note: {note}" for note in sweep.notes]


def print_sweep(sweep: Sweep, console: Console | None = None) -> None:
    """The table on stdout; as wide as it needs to be where nobody looks."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    console.print(head(sweep), highlight=False, markup=False, soft_wrap=True)
    table = Table(*HEADINGS, box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    for point in sweep.points:
        table.add_row(*cells(point), end_section=point is _last_of_lengths(sweep, point))
    console.print(table, highlight=False)
    for line in foot(sweep):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def check_folder(folder: Path) -> None:
    """Refuses a place where no folder can be, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(
            f"--out {folder} cannot be made a folder ({error.strerror}); choose another one"
        ) from error


def write_sweep(sweep: Sweep, folder: Path) -> list[Path]:
    """Writes bench.json, bench.png and bench.html; a `StorageError` when that fails."""
    page = render(sweep)
    with png_axes("front", _SIZE_INCHES, _MARGINS) as (axes, picture):
        draw(axes, sweep)
    made = {
        "bench.json": (json.dumps(sweep.to_json(), indent=2) + "\n").encode(),
        "bench.png": picture.getvalue(),
        "bench.html": page.encode(),
    }
    for name, data in made.items():
        _write(folder / name, data)
    return [folder / name for name in made]


def render(sweep: Sweep) -> str:
    """The page, whole in itself."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    source = files("batchmla.bench").joinpath("bench.html.jinja").read_text(encoding="utf-8")
    with svg_axes("front", _SIZE_INCHES, _MARGINS) as (axes, svg):
        draw(axes, sweep)
    return environment.from_string(source).render(
        sweep=sweep,
        head=head(sweep),
        foot=foot(sweep),
        headings=HEADINGS,
        rows=[(point, cells(point)) for point in sweep.points],
        svg=svg.getvalue(),
    )


def draw(axes: "Axes", sweep: Sweep) -> None:
    """Output tokens a second over median latency, a line along each front, with the numbers of
    rows at once; what another point beats is hollow.
    """
    pairs = list(dict.fromkeys(map(lengths_of, sweep.points)))
    for number, pair in enumerate(pairs):
        colour = COLOURS[number % len(COLOURS)]
        points = [point for point in sweep.points if lengths_of(point) == pair]
        front = sorted((p for p in points if p.is_pareto), key=lambda p: p.latency_s.p50)
        xs, ys = [p.latency_s.p50 for p in front], [p.output_tokens_per_s for p in front]
        marker = _MARKERS[number % len(_MARKERS)]
        label = f"{pair[0]:,} + {pair[1]:,} tokens"
        axes.plot(xs, ys, color=colour, marker=marker, lw=1.4, label=label)
        for point in points:
            at = point.latency_s.p50, point.output_tokens_per_s
            if not point.is_pareto:
                axes.plot(*at, color=colour, marker=marker, mfc="none", ls="")
            axes.annotate(
                f"{point.concurrency}", at, xytext=(5, 5), textcoords="offset points", color=INK
            )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    plain_numbers(axes)
    axes.xaxis.set_minor_formatter(axes.xaxis.get_major_formatter())
    axes.tick_params(axis="x", which="minor", labelsize=7)
    axes.set_xlabel("latency of a row, median, s")
    axes.set_ylabel("output tokens/s")
    axes.legend(loc="best", frameon=False)


def _last_of_lengths(sweep: Sweep, point: Point) -> Point:
    return [each for each in sweep.points if lengths_of(each) == lengths_of(point)][-1]


def _seconds(spread: Spread) -> str:
    return f"{spread.p50:,.3g} / {spread.p95:,.3g} s"


def _milliseconds(spread: Spread) -> str:
    return f"{1000 * spread.p50:,.3g} / {1000 * spread.p95:,.3g} ms"


def _write(path: Path, data: bytes) -> None:
    """Replaces the file as a whole."""
    aside = path.with_name(f".{secrets.token_hex(4)}.part")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written ({error.strerror or error}); choose another --out"
        ) from error
