"""How far a run is: a table on a terminal, lines elsewhere, a heartbeat file.

A thread of its own looks a few times a second, so that nothing is done per row or per token.
"""

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from batchmla.core import EngineStats
from batchmla.errors import BatchmlaError
from batchmla.jobs.series import RunCounts, Sample, Series
from batchmla.jobs.store import Store

ProgressKind = Literal["auto", "rich", "plain", "off"]

_LOG = logging.getLogger(__name__)
_TICK_S = 0.5
_HEARTBEAT_S = 2.0
_LINE_S = 10.0
_MOST_LINE_S = 600.0
_RATE_S = 60.0  # rates are over the last so many seconds
_SETTLED_ROWS = 20  # and rows: the first to finish are the short ones
_SETTLED_S = 10.0
_MAX_LOOKS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(RunCounts):
    """What progress shows. Rates are recent ones; None is not known yet."""

    at_s: float  # since the epoch
    phase: str
    rows: int | None
    rows_per_s: float | None = None
    tokens_per_s: float | None = None
    is_settled: bool = True  # enough rows have finished to foretell the others

    @classmethod
    def of(
        cls, stats: EngineStats, *, phase: str, rows: int | None, done: int, failed: int
    ) -> "Snapshot":
        """The engine's counts now, with the rows of the output."""
        return cls(
            at_s=time.time(),
            phase=phase,
            rows=rows,
            done=done,
            failed=failed,
            running=stats.running,
            waiting=stats.waiting,
            used_pages=stats.used_pages,
            total_pages=stats.total_pages,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            computed_tokens=stats.computed_tokens,
            steps=stats.steps,
            preemptions=stats.preemptions,
        )

    def sample(self, run_s: float, elapsed_s: float) -> Sample:
        """What the series keeps of it."""
        counts = {each.name: getattr(self, each.name) for each in fields(RunCounts)}
        return Sample(run_s=run_s, elapsed_s=elapsed_s, **counts)

    @property
    def eta_s(self) -> float | None:
        """Seconds until all rows are done, at the recent rate; None until that is settled."""
        if self.rows is None or not self.rows_per_s or not self.is_settled:
            return None
        return (self.rows - self.done) / self.rows_per_s

    def line(self) -> str:
        """All of it in one line."""
        rows = f"{self.done:,}" if self.rows is None else f"{self.done:,}/{self.rows:,}"
        words = [f"{self.phase}: {rows} rows", f"{self.failed:,} failed"]
        if self.tokens_per_s is not None:
            words.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.total_pages:
            words.append(f"KV pool {self.used_pages / self.total_pages:.0%}")
        words.append(f"{self.running} running, {self.waiting} waiting")
        if self.eta_s is not None:
            words.append(f"{format_s(self.eta_s)} left")
        return ", ".join(words)


def format_s(seconds: float) -> str:
    """Like 45 s, 12 min, 3 h 05 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def progress_path(output: Path) -> Path:
    return output / "_batchmla" / "progress.json"


class View(Protocol):
    """Shows snapshots to somebody."""

    def show(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class PlainView:
    """One line every 10 s, and in longer runs every tenth of the time so far, up to 10 min."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start_s = time.monotonic()
        self._next_s = self._start_s + _LINE_S

    def show(self, snapshot: Snapshot) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + min(_MOST_LINE_S, max(_LINE_S, (now_s - self._start_s) / 10))
        print(snapshot.line(), file=self._stream, flush=True)

    def close(self) -> None:
        pass


class RichView:
    """A small live table on a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(self._table(snapshot), refresh=True)

    def close(self) -> None:
        self._live.stop()

    @staticmethod
    def _table(snapshot: Snapshot) -> Table:
        total = "?" if snapshot.rows is None else f"{snapshot.rows:,}"
        rate, eta = snapshot.tokens_per_s, snapshot.eta_s
        pool = snapshot.used_pages / snapshot.total_pages if snapshot.total_pages else None
        table = Table("", "rows", "failed", "tokens/s", "KV pool", "running", "waiting", "left")
        table.add_row(
            snapshot.phase,
            f"{snapshot.done:,} / {total}",
            f"{snapshot.failed:,}",
            "" if rate is None else f"{rate:,.0f}",
            "" if pool is None else f"{pool:.0%}",
            f"{snapshot.running:,}",
            f"{snapshot.waiting:,}",
            "" if eta is None else format_s(eta),
        )
        return table


def make_view(kind: ProgressKind, stream: TextIO = sys.stderr) -> View | None:
    """`auto`: the table when `stream` is a terminal, else the lines."""
    if kind == "off":
        return None
    if kind == "rich" or (kind == "auto" and stream.isatty()):
        return RichView(Console(file=stream))
    return PlainView(stream)


class Rates:
    """Recent rates of rows and tokens, from looks in the order of time.

    Time before the first token or row does not count: weights were being loaded. Rows are counted
    back over at least a minute and 20 rows, so that long rows do not make the rate jump.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[float, int]] = deque(maxlen=_MAX_LOOKS)
        self._tokens: deque[tuple[float, int]] = deque()
        self._start: tuple[float, int] | None = None  # when work began, and rows done by then

    def add(self, snapshot: Snapshot, now_s: float) -> Snapshot:
        """`snapshot` with the rates, as far as they are known at `now_s`."""
        done, tokens = snapshot.done, snapshot.generated_tokens
        if self._start is None or (tokens == 0 and done == self._start[1]):
            self._start = (now_s, done)
            self._rows.clear()
            self._tokens.clear()
        self._rows.append((now_s, done))
        self._tokens.append((now_s, tokens))
        while self._tokens[0][0] < now_s - _RATE_S:
            self._tokens.popleft()
        while (
            len(self._rows) > 1
            and self._rows[1][0] <= now_s - _RATE_S
            and done - self._rows[1][1] >= _SETTLED_ROWS
        ):
            self._rows.popleft()
        start_s, start_done = self._start
        needed = _SETTLED_ROWS
        if snapshot.rows is not None:  # a small job is foretold from its half
            needed = min(needed, max(1, (snapshot.rows - start_done + 1) // 2))
        return replace(
            snapshot,
            rows_per_s=_rate(self._rows, now_s),
            tokens_per_s=_rate(self._tokens, now_s),
            is_settled=now_s - start_s >= _SETTLED_S and done - start_done >= needed,
        )


def _rate(looks: Sequence[tuple[float, int]], now_s: float) -> float | None:
    (then_s, then), (_, now) = looks[0], looks[-1]
    return None if now_s - then_s < _TICK_S else (now - then) / (now_s - then_s)


class Ticker:
    """Looks at the run, adds rates, shows, and writes the heartbeat that `status` reads and the
    series that `report` draws."""

    def __init__(self, look: Callable[[], Snapshot], view: View | None, store: Store) -> None:
        self._look = look
        self._view = view
        self._store = store
        self._rates = Rates()
        self._series = Series(store)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, with a last heartbeat."""
        self._ended.set()
        self._thread.join()
        if self._view is not None:
            self._view.close()

    def _run(self) -> None:
        next_beat_s, run_s, start_s = 0.0, round(time.time(), 3), time.monotonic()
        while True:
            is_last = self._ended.wait(_TICK_S)
            snapshot = self._rates.add(self._look(), time.monotonic())
            if self._view is not None:
                self._view.show(snapshot)
            if is_last or time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + _HEARTBEAT_S
                self._beat(snapshot)
            elapsed_s = round(time.monotonic() - start_s, 3)
            if is_last or self._series.is_due(elapsed_s):
                self._series.add(snapshot.sample(run_s, elapsed_s))
            if is_last:
                return

    def _beat(self, snapshot: Snapshot) -> None:
        data = {**asdict(snapshot), "eta_s": snapshot.eta_s}
        try:
            self._store.write_soft(progress_path(self._store.root), json.dumps(data).encode())
        except BatchmlaError as error:  # the journal will meet the same disk and say so
            _LOG.warning("no heartbeat: %s", error)
