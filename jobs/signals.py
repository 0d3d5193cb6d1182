"""SIGINT and SIGTERM: the first ends the run in order, the second at once."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_EXIT_BASE = 128  # a shell's exit code of a process ended by a signal


class StopRun(BaseException):
    """Raised in the main thread by the first signal, where `Signals.interruptibly` allows it."""


class Signals:
    """Catches both signals inside `with`; without effect outside the main thread.

    `signum` is the first signal that came. An exception is raised only in interruptible code,
    which holds no lock and has nothing to save; other code looks at `signum`.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._is_interruptible = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def is_stopping(self) -> bool:
        return self.signum is not None

    def interruptibly(self, function: Callable[..., T], *args: Any) -> T:
        """Calls `function`, which may be left anywhere by a `StopRun`."""
        before, self._is_interruptible = self._is_interruptible, True
        try:
            if self.signum is not None:
                raise StopRun
            return function(*args)
        finally:
            self._is_interruptible = before

    def guarded(self, function: Callable[P, T]) -> Callable[P, T]:
        """`function` for use in interruptible code, never left in its middle."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            before, self._is_interruptible = self._is_interruptible, False
            try:
                result = function(*args, **kwargs)
            finally:
                self._is_interruptible = before
            if self.signum is not None:
                raise StopRun
            return result

        return call

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            os._exit(_EXIT_BASE + signum)
        self.signum = signum
        if self._is_interruptible:
            raise StopRun
