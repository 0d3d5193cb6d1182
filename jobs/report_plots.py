"""The plots of a report as SVG text that stands inside HTML."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from batchmla.jobs.figure import COLOURS, INK, plain_numbers, svg_axes
from batchmla.jobs.report_counts import Lengths, histogram
from batchmla.jobs.series import Sample

MOST_POINTS = 500

Line = tuple[str, Sequence[float], Sequence[float]]  # name, x, y


class Timeline:
    """The samples of all runs of a job one after the other, without the time between the runs."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.runs = _by_run(samples)
        self._starts_s = [0.0]
        for run in self.runs:
            self._starts_s.append(self._starts_s[-1] + run[-1].elapsed_s)

    @property
    def seams_s(self) -> Sequence[float]:
        """Where one run ends and the next begins."""
        return self._starts_s[1:-1]

    def rates(self, *names: str, per: str | None = None) -> Mapping[str, tuple[Any, Any]]:
        """(x, y) for each of a sample's sums: its growth a second, or for each of the sum `per`.

        A value stands at the middle of the time it was measured over.
        """
        found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
        for start_s, run in zip(self._starts_s, self.runs, strict=False):
            for before, after in pairwise([Sample(run_s=0, elapsed_s=0, done=0, failed=0), *run]):
                wide = after.elapsed_s - before.elapsed_s
                if per is not None:
                    wide = getattr(after, per) - getattr(before, per)
                if wide <= 0:
                    continue
                middle_s = start_s + (before.elapsed_s + after.elapsed_s) / 2
                for name, (xs, ys) in found.items():
                    xs.append(middle_s)
                    ys.append(max(0.0, (getattr(after, name) - getattr(before, name)) / wide))
        return found

    def values(self, *names: str) -> Mapping[str, tuple[Any, Any]]:
        """(x, y) for each of a sample's values."""
        points = [
            (start_s + sample.elapsed_s, sample)
            for start_s, run in zip(self._starts_s, self.runs, strict=False)
            for sample in run
        ]
        xs = [x for x, _ in points]
        return {name: (xs, [getattr(sample, name) for _, sample in points]) for name in names}


def _by_run(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of each run, thinned out to what a plot can show, the last one always there."""
    runs: dict[float, list[Sample]] = {}
    step = -(-len(samples) // MOST_POINTS) or 1
    for sample in samples:
        runs.setdefault(sample.run_s, []).append(sample)
    return [run[:-1][::step] + run[-1:] for run in runs.values()]


def throughput_plot(timeline: Timeline) -> str:
    """Tokens a second."""
    rates = timeline.rates("generated_tokens", "prompt_tokens")
    lines = [
        ("generated", *rates["generated_tokens"]),
        ("prompt", *rates["prompt_tokens"]),
    ]
    return _over_time("throughput", timeline, lines, "tokens/s")


def pool_plot(timeline: Timeline) -> str:
    """Per cent of the KV pool's pages in use."""
    values = timeline.values("used_pages", "total_pages")
    xs, used = values["used_pages"]
    shares = [
        100 * pages / total if total else 0.0
        for pages, total in zip(used, values["total_pages"][1], strict=True)
    ]
    return _over_time("pool", timeline, [("in use", xs, shares)], "% of pages", top=100)


def rows_plot(timeline: Timeline) -> str:
    """Sequences in the engine."""
    values = timeline.values("running", "waiting")
    lines = [(name, *points) for name, points in values.items()]
    return _over_time("batch", timeline, lines, "rows")


def step_plot(timeline: Timeline) -> str | None:
    """Tokens in a forward pass; None where the runs did not count their passes."""
    rates = timeline.rates("computed_tokens", "generated_tokens", per="steps")
    (xs, computed), (_, generated) = rates["computed_tokens"], rates["generated_tokens"]
    if not any(computed):
        return None
    decode = [min(pair) for pair in zip(computed, generated, strict=True)]
    prefill = [whole - part for whole, part in zip(computed, decode, strict=True)]
    lines = [("decode", xs, decode), ("prefill", xs, prefill)]
    return _over_time("step", timeline, lines, "tokens a step")


def lengths_plot(name: str, lengths: Lengths) -> str:
    """A histogram."""
    edges, rows, widens = histogram(lengths)
    with svg_axes(f"{name}-lengths") as (axes, text):
        axes.stairs(rows, edges, fill=True, color=COLOURS[0], alpha=0.8)
        if widens:
            axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, edges[-1])
        plain_numbers(axes)
        axes.set_xlabel("tokens")
        axes.set_ylabel("rows")
    return text.getvalue()


def _over_time(
    name: str, timeline: Timeline, lines: Sequence[Line], unit: str, top: float | None = None
) -> str:
    longest_s = max((x for _, xs, _ in lines for x in xs), default=0.0)
    scale, word = (3600.0, "h") if longest_s > 7200 else (60.0, "min")
    if longest_s < 180:
        scale, word = 1.0, "s"
    with svg_axes(name) as (axes, text):
        for colour, (label, xs, ys) in zip(COLOURS, lines, strict=False):
            marker = "." if len(xs) < 3 else ""
            axes.plot([x / scale for x in xs], ys, color=colour, label=label, marker=marker, lw=1.4)
        for seam_s in timeline.seams_s:
            axes.axvline(seam_s / scale, color=INK, lw=0.8, ls=":")
        axes.set_xlim(left=0)
        axes.set_ylim(0, top)
        plain_numbers(axes)
        axes.set_xlabel(f"running time, {word}")
        axes.set_ylabel(unit)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return text.getvalue()
