"""Which prompts which replica gets next: windows of them, cut from the packed order.

Windows end where prompts stop sharing a beginning, as far as their size allows, and a replica
prefers those that begin like what it had before. Prompts of a replica that died are dealt out
again; those that were there at two deaths are suspects and run apart from all others, so that a row
that kills its replica ends alone, as its own error.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import numpy as np

from batchmla.core import Prompt, TokenIds

MOST_STRIKES = 4  # deaths that a row may be there at; the last one with no other row
_KEY_TOKENS = 1024  # of a prompt's start that are compared
_LEAST_SHARED = 32  # tokens that are worth staying together for
_LOOK_WINDOWS = 16
_RECENT_WINDOWS = 4
_SUSPECT_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSizes:
    """Bounds of a window, and of what a replica holds at a time; one prompt always fits."""

    window_rows: int
    window_tokens: int
    replica_rows: int
    replica_tokens: int

    @classmethod
    def of(cls, max_num_seqs: int, kv_capacity_tokens: int) -> "WindowSizes":
        """An engine holds what it runs and a window more, so that it never waits for the next."""
        window_rows = max(1, max_num_seqs // 4)
        window_tokens = max(1, kv_capacity_tokens // 8)
        return cls(
            window_rows=window_rows,
            window_tokens=window_tokens,
            replica_rows=max_num_seqs + window_rows,
            replica_tokens=kv_capacity_tokens + window_tokens,
        )


@dataclass(slots=True, eq=False)
class Window:
    """Prompts that go to a replica together. `tokens`: of prompts and expected completions."""

    prompts: list[Prompt]
    tokens: int
    is_apart: bool = False  # nothing else runs beside it


@dataclass(slots=True, eq=False)
class Load:
    """What a replica holds."""

    rows: int = 0
    tokens: int = 0
    is_apart: bool = False
    recent: deque[TokenIds] = field(default_factory=lambda: deque(maxlen=_RECENT_WINDOWS))

    def add(self, window: Window) -> None:
        """A window was sent."""
        self.rows += len(window.prompts)
        self.tokens += window.tokens
        self.is_apart = window.is_apart
        self.recent.append(window.prompts[-1].token_ids[:_KEY_TOKENS])

    def remove(self, prompt: Prompt) -> None:
        """A prompt has ended, or is taken back."""
        self.rows -= 1
        self.tokens -= _tokens(prompt)
        if self.rows == 0:
            self.is_apart = False


class Backlog:
    """Prompts that no replica has yet."""

    def __init__(self, sizes: WindowSizes) -> None:
        self.waiting_rows = 0
        self._sizes = sizes
        self._windows: deque[Window] = deque()
        self._suspects: deque[Prompt] = deque()
        self._strikes: dict[int, int] = {}  # by index
        self._loads: list[Load] = []
        self._ward: Load | None = None  # whose replica takes the suspects

    def open_load(self) -> Load:
        """For a replica that begins to take windows."""
        load = Load()
        self._loads.append(load)
        return load

    def close_load(self, load: Load) -> None:
        """The replica takes none any more; what it held was given back before."""
        self._loads.remove(load)
        if self._ward is load:
            self._ward = None

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Prompts in packed order."""
        self._windows.extend(self._cut(prompts))
        self.waiting_rows += len(prompts)

    def end(self, load: Load, prompt: Prompt) -> None:
        """The prompt's completion is there."""
        load.remove(prompt)
        self._strikes.pop(prompt.index, None)

    def give_back(self, load: Load, window: Window, *, is_suspect: bool) -> list[Prompt]:
        """The rest of a window of a replica that died, with what it has ended removed.

        `is_suspect`: the prompts may be the cause. Returns those that are taken for it by now; the
        others wait again.
        """
        is_alone = window.is_apart and len(window.prompts) == 1
        again: list[Prompt] = []
        guilty: list[Prompt] = []
        for prompt in window.prompts:
            load.remove(prompt)
            strikes = self._strikes.get(prompt.index, 0) + is_suspect
            if is_alone and strikes >= MOST_STRIKES:
                self._strikes.pop(prompt.index, None)
                guilty.append(prompt)
                continue
            self._strikes[prompt.index] = strikes
            (self._suspects if strikes > 1 else again).append(prompt)
        self._windows.extendleft(reversed(self._cut(again)))
        self.waiting_rows += len(window.prompts) - len(guilty)
        return guilty

    def take(self, load: Load) -> Window | None:
        """The next window of the replica with this load, if it has room and there is one."""
        if load.is_apart:
            return None
        if self._suspects and self._ward in (None, load):
            self._ward = load
            window = self._take_suspects() if load.rows == 0 else None
        else:
            if self._ward is load:
                self._ward = None
            window = self._take_ordinary(load)
        if window is not None:
            self.waiting_rows -= len(window.prompts)
            load.add(window)
        return window

    def _take_suspects(self) -> Window:
        first = islice(self._suspects, _SUSPECT_ROWS)
        mild = takewhile(lambda each: self._strikes[each.index] < MOST_STRIKES - 1, first)
        count = max(1, sum(1 for _ in mild))
        prompts = [self._suspects.popleft() for _ in range(count)]
        return Window(prompts, sum(map(_tokens, prompts)), is_apart=True)

    def _take_ordinary(self, load: Load) -> Window | None:
        if not self._windows:
            return None
        place = self._choose(load)
        window = self._windows[place]
        rows = self._sizes.replica_rows - load.rows
        most_rows = min(rows, -(-self.waiting_rows // (2 * len(self._loads))))
        if load.rows and load.tokens + window.tokens > self._sizes.replica_tokens:
            return None
        if most_rows < 1:
            return None
        del self._windows[place]
        if len(window.prompts) > most_rows:
            window, rest = _parted(window, most_rows)
            self._windows.insert(place, rest)
        return window

    def _choose(self, load: Load) -> int:
        """A window that begins like what this replica had, or like nothing that others had; else
        the first.
        """
        fresh: int | None = None
        for place, window in enumerate(self._windows):
            if place == _LOOK_WINDOWS:
                break
            ids = window.prompts[0].token_ids[:_KEY_TOKENS]
            own = _most_shared(ids, load.recent)
            others = max((_most_shared(ids, each.recent) for each in self._loads), default=0)
            if own >= max(others, _LEAST_SHARED):
                return place
            if fresh is None and others < _LEAST_SHARED:
                fresh = place
        return 0 if fresh is None else fresh

    def _cut(self, prompts: Iterable[Prompt]) -> list[Window]:
        windows: list[Window] = []
        for prompt in prompts:
            tokens = _tokens(prompt)
            if windows and self._joins(windows[-1], prompt, tokens):
                windows[-1].prompts.append(prompt)
                windows[-1].tokens += tokens
            else:
                windows.append(Window([prompt], tokens))
        return windows

    def _joins(self, window: Window, prompt: Prompt, tokens: int) -> bool:
        rows, sizes = len(window.prompts), self._sizes
        if rows >= sizes.window_rows or window.tokens + tokens > sizes.window_tokens:
            return False
        if 2 * rows < sizes.window_rows:
            return True
        last, before = window.prompts[-1].token_ids, window.prompts[0].token_ids
        is_group = _shared(last, before) >= _LEAST_SHARED  # a half-full one ends with its group
        return not is_group or _shared(last, prompt.token_ids) >= _LEAST_SHARED


def _tokens(prompt: Prompt) -> int:
    """Of the prompt and what its completion is expected to take, or may take."""
    expected = prompt.expected_tokens
    return len(prompt.token_ids) + (expected or prompt.params.max_tokens or 0)


def _parted(window: Window, num_rows: int) -> tuple[Window, Window]:
    first, rest = window.prompts[:num_rows], window.prompts[num_rows:]
    tokens = sum(map(_tokens, first))
    return Window(first, tokens), Window(rest, window.tokens - tokens)


def _most_shared(ids: TokenIds, recent: Iterable[TokenIds]) -> int:
    return max((_shared(ids, each) for each in recent), default=0)


def _shared(one: TokenIds, other: TokenIds) -> int:
    """Leading tokens that both have, of the first `_KEY_TOKENS`."""
    least = min(len(one), len(other), _KEY_TOKENS)
    differs = one[:least] != other[:least]
    first = int(np.argmax(differs)) if least else 0
    return first if least and differs[first] else least
