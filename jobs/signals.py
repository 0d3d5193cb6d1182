"""SIGINT and SIGTERM: the first ends the run in order, the second at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_EXIT_BASE = 128  # a shell's exit code of a process ended by a signal


class StopRun(BaseException):
    """Raised in the main thread by the first signal, where `Signals.interruptible` allows it."""


class Signals:
    """Catches both signals inside `with`; without effect outside the main thread.

    `signum` is the first signal that came. An exception is raised only in `interruptible` code,
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

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Code that may be left anywhere."""
        with self._set(True):
            if self.is_stopping():
                raise StopRun
            yield

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, called from interruptible code, never left in its middle."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._set(False):
                result = function(*args, **kwargs)
            if self.is_stopping():
                raise StopRun
            return result

        return call

    @contextmanager
    def _set(self, value: bool) -> Iterator[None]:
        before, self._is_interruptible = self._is_interruptible, value
        try:
            yield
        finally:
            self._is_interruptible = before

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            os._exit(_EXIT_BASE + signum)
        self.signum = signum
        if self._is_interruptible:
            raise StopRun
