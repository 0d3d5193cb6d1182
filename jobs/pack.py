"""The packer: a sliding window of prompts between the reader's thread and the engine's.

The reader puts prompts in input order and waits while the window is full; the engine takes them in
packed order. Bounded in bytes, and in how far a prompt may lie ahead of the oldest unfinished row.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from batchmla.core import Completion, Prompt
from batchmla.jobs.pack_drain import Drain, longest_first
from batchmla.jobs.pack_future import PrefixFuture
from batchmla.jobs.pack_lengths import PromptLengths
from batchmla.jobs.pack_order import find_neighbours, packed_order
from batchmla.jobs.pack_twins import Twins, Waiting

WINDOW_BYTES = 256 << 20  # of int32 prompt ids
_WAIT_S = 0.5


class Stopped(Exception):
    """The run is ending: no prompt is taken any more."""


class Packer:
    """A `PromptSource`. Prompts wait in two lists: `ready` is packed and drains, `next` gathers.

    When `ready` is empty, what has gathered (at most half a window) is packed and becomes `ready`:
    there is no barrier, as the reader goes on meanwhile, and no row is overtaken for ever.
    """

    def __init__(
        self,
        *,
        order: Literal["auto", "input"],
        window_rows: int,
        window_bytes: int = WINDOW_BYTES,
        dedupe: bool = False,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.lengths = PromptLengths()
        self._is_stopping = is_stopping  # set by a signal, which notifies nobody
        self._order = order
        self._window_rows = window_rows
        self._window_bytes = window_bytes
        self._ready: deque[Waiting] = deque()
        self._next: list[Waiting] = []
        self._taken: dict[int, Waiting] = {}
        self._waiting_bytes = 0
        self._unfinished: deque[int] = (
            deque()
        )  # indices in input order, the finished ones lazily gone
        self._finished: set[int] = set()  # of those, behind the oldest unfinished
        self._future: PrefixFuture | None = None
        self._drain = Drain()
        self._twins = Twins() if dedupe else None
        self._wanted: tuple[int, int] | None = None  # index and bytes a waiting reader has
        self._is_hungry = False  # the engine waits
        self._is_ended = False
        self._is_stopped = False
        self._lock = threading.Lock()  # entered at less cost than its condition
        self._changed = threading.Condition(self._lock)

    # the reader's side

    def put(self, prompts: Sequence[Waiting]) -> None:
        """Adds the next prompts in input order; waits for room. Raises `Stopped`."""
        if not prompts:
            return
        num_bytes = sum(each.num_bytes for each in prompts)
        with self._lock:
            if self._has_room_for_all(prompts, num_bytes):
                self._add(prompts, num_bytes)
            else:
                for each in prompts:
                    self._wait_for_room(each.prompt.index, each.num_bytes)
                    self._add((each,), each.num_bytes)
            if self._is_hungry:
                self._changed.notify_all()

    def end(self) -> None:
        """No prompt follows."""
        with self._lock:
            self._is_ended = True
            self._changed.notify_all()

    # the engine's side

    def take(self, limit: int, *, wait: bool) -> Sequence[Prompt]:
        """Up to `limit` prompts in packed order, with their expected lengths."""
        with self._lock:
            if wait and not self._wait_for_prompt():
                return ()
            taken: list[Waiting] = []
            self._drain.asked(limit, len(self._taken))
            while len(taken) < limit and (self._ready or self._next):
                if not self._ready:
                    self._pack()
                self._sort_the_last()
                count = min(limit - len(taken), len(self._ready))
                part = [self._ready.popleft() for _ in range(count)]
                self._waiting_bytes -= sum(each.num_bytes for each in part)
                taken += part
                if self._future is not None:
                    self._future.take(count)
            self._taken.update((each.prompt.index, each) for each in taken)
            self._wake_reader()
        return [self._with_length(each.prompt) for each in taken]

    def foresee(self, page_tokens: int) -> PrefixFuture | None:
        """Of the pages that prompts of the window share; asked before the first prompt is taken.

        Used in the thread that takes the prompts.
        """
        self._future = PrefixFuture(page_tokens) if self._order == "auto" else None
        return self._future

    def has_prompt(self) -> bool:
        """Waits until a prompt is there (true) or none will come (false)."""
        with self._lock:
            return self._wait_for_prompt()

    def learn(self, completion: Completion) -> None:
        """Takes note of how long a completion turned out; called as soon as it is there."""
        taken = self._taken.get(completion.index)
        assert taken is not None, f"row {completion.index} was not taken, or is finished"
        self.lengths.learn(taken.prompt, completion)

    def finish(self, completions: Sequence[Completion]) -> list[tuple[Waiting, Completion]]:
        """Takes note of finished rows and returns what was put for each, and for its twins."""
        with self._lock:
            found = [(self._taken.pop(each.index), each) for each in completions]
            if self._twins is not None:
                found += [pair for each in completions for pair in self._twins.ended(each)]
            self._finished.update(each.index for _, each in found)
            while self._unfinished and self._unfinished[0] in self._finished:
                self._finished.remove(self._unfinished.popleft())
            self._wake_reader()
        return found

    @property
    def num_twins(self) -> int:
        """Rows that were not run, because an equal one was."""
        return 0 if self._twins is None else self._twins.count

    def stop(self) -> None:
        """Lets both sides go: `put` raises, `take` gives nothing."""
        with self._lock:
            self._is_stopped = True
            self._changed.notify_all()

    def _with_length(self, prompt: Prompt) -> Prompt:
        """The prompt with what its completion is expected to take.

        It is put into the prompt, which nobody else has had yet: a second one would cost more than
        all else that is done here.
        """
        prompt.expected_tokens = self.lengths.expected(prompt)
        return prompt

    # under the lock

    def _add(self, prompts: Sequence[Waiting], num_bytes: int) -> None:
        if self._is_stopped:
            raise Stopped
        self._unfinished.extend(each.prompt.index for each in prompts)
        if self._twins is not None:
            prompts = [each for each in prompts if not self._twins.joins(each)]
            num_bytes = sum(each.num_bytes for each in prompts)
        self._next.extend(prompts)
        self._waiting_bytes += num_bytes

    def _has_room_for_all(self, prompts: Sequence[Waiting], num_bytes: int) -> bool:
        oldest = self._unfinished[0] if self._unfinished else prompts[0].prompt.index
        is_near = prompts[-1].prompt.index < oldest + self._window_rows
        return is_near and self._waiting_bytes + num_bytes <= self._window_bytes

    def _wait_for_room(self, index: int, num_bytes: int) -> None:
        if self._has_room(index, num_bytes):
            return
        self._wanted = (index, num_bytes)
        if self._is_hungry:
            self._changed.notify_all()
        while not self._is_stopped and not self._has_slack():
            self._changed.wait()
        self._wanted = None

    def _wait_for_prompt(self) -> bool:
        """Waits until a prompt is there (true) or none will come (false)."""
        self._wake_reader()
        self._is_hungry = True
        while not (self._ready or self._next or self._is_ended or self._is_stopped):
            self._changed.wait(_WAIT_S)
            if self._is_stopping():
                self._is_stopped = True
        self._is_hungry = False
        return not self._is_stopped and bool(self._ready or self._next)

    def _has_room(self, index: int, num_bytes: int) -> bool:
        if self._unfinished and index >= self._unfinished[0] + self._window_rows:
            return False
        is_empty = not (self._ready or self._next)
        return is_empty or self._waiting_bytes + num_bytes <= self._window_bytes

    def _has_slack(self) -> bool:
        """Whether the waiting reader should go on: with room for many rows, or when none wait."""
        if self._wanted is None:
            return True
        index, num_bytes = self._wanted
        if not self._has_room(index, num_bytes):
            return False
        is_empty = not (self._ready or self._next)
        ahead_rows, ahead_bytes = self._window_rows // 8, self._window_bytes // 8
        return is_empty or self._has_room(index + ahead_rows, num_bytes + ahead_bytes)

    def _wake_reader(self) -> None:
        if self._wanted is not None and self._has_slack():
            self._changed.notify_all()

    def _pack(self) -> None:
        """Half a window at most: while it drains, the reader refills the other half. At the end all
        that is left.
        """
        count = len(self._next) if self._is_ended else max(1, self._window_rows // 2)
        if self._waiting_bytes * 2 > self._window_bytes and not self._is_ended:
            count = min(count, max(1, len(self._next) // 2))
        gathered, self._next = self._next[:count], self._next[count:]
        if self._order == "auto":
            gathered = self._packed(gathered)
        self._ready.extend(gathered)

    def _packed(self, gathered: list[Waiting]) -> list[Waiting]:
        prompts = [each.prompt for each in gathered]
        neighbours = find_neighbours(prompts)
        order = packed_order(prompts, self._lengths(gathered), neighbours=neighbours)
        self._drain.packed(len(order))
        if self._future is not None:
            self._future.plan(prompts, neighbours, order)
        return [gathered[position] for position in order]

    def _sort_the_last(self) -> None:
        """Longest first, once what is ready is the end of the job."""
        is_end = self._order == "auto" and self._is_ended and not self._next
        if not is_end or not self._drain.may_be_due(len(self._ready)):
            return
        lengths = self._lengths(self._ready)
        if not self._drain.is_due(lengths):
            return
        rows, order = list(self._ready), longest_first(lengths)
        self._ready = deque(rows[position] for position in order)
        if self._future is not None:
            prompts = [each.prompt for each in rows]
            self._future.plan(prompts, find_neighbours(prompts), order)

    def _lengths(self, rows: Iterable[Waiting]) -> list[int]:
        return [self.lengths.expected(each.prompt) for each in rows]
