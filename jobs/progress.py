"""How far a run is: a table on a terminal, a line every 10 s elsewhere, a heartbeat file.

A thread of its own looks a few times a second, so that nothing is done per row or per token.
"""

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from batchmla.errors import StorageError
from batchmla.jobs.store import Store

ProgressKind = Literal["auto", "rich", "plain", "off"]

_LOG = logging.getLogger(__name__)
_TICK_S = 0.5
_HEARTBEAT_S = 2.0
_LINE_S = 10.0
_RATE_S = 60.0  # rates are over the last so many seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look at a run. Rates are recent ones; None is not known yet."""

    at_s: float  # since the epoch
    phase: str
    rows: int | None
    done: int
    failed: int
    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    total_pages: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    rows_per_s: float | None = None
    tokens_per_s: float | None = None

    @property
    def eta_s(self) -> float | None:
        """Seconds until all rows are done, at the recent rate."""
        if self.rows is None or not self.rows_per_s:
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
    """One line every 10 s."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_s = time.monotonic() + _LINE_S

    def show(self, snapshot: Snapshot) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s += _LINE_S
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


class Ticker:
    """Looks at the run, adds rates, shows, and writes the heartbeat that `status` reads."""

    def __init__(self, look: Callable[[], Snapshot], view: View | None, store: Store) -> None:
        self._look = look
        self._view = view
        self._store = store
        self._seen: deque[tuple[float, int, int]] = deque()  # time, rows, tokens
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
        next_beat_s = 0.0
        while True:
            is_last = self._ended.wait(_TICK_S)
            snapshot = self._with_rates(self._look())
            if self._view is not None:
                self._view.show(snapshot)
            if is_last or time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + _HEARTBEAT_S
                self._beat(snapshot)
            if is_last:
                return

    def _beat(self, snapshot: Snapshot) -> None:
        data = {**asdict(snapshot), "eta_s": snapshot.eta_s}
        try:
            self._store.write_soft(progress_path(self._store.root), json.dumps(data).encode())
        except StorageError as error:  # the journal will meet the same disk and say so
            _LOG.warning("no heartbeat: %s", error)

    def _with_rates(self, snapshot: Snapshot) -> Snapshot:
        now_s = time.monotonic()
        self._seen.append((now_s, snapshot.done, snapshot.generated_tokens))
        while self._seen[0][0] < now_s - _RATE_S:
            self._seen.popleft()
        then_s, rows, tokens = self._seen[0]
        if now_s - then_s < _TICK_S:
            return snapshot
        return replace(
            snapshot,
            rows_per_s=(snapshot.done - rows) / (now_s - then_s),
            tokens_per_s=(snapshot.generated_tokens - tokens) / (now_s - then_s),
        )
