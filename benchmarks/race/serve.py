"""The worker's end of the pipe: one JSON object a line, told apart from a library's chatter.

It has no dependencies, since it also runs in the peer's own environment.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "@race "
Message = dict[str, Any]


def serve(actions: dict[str, Callable[[Message], Message]], hello: Message) -> None:
    """The worker's loop: answers until its input ends."""
    _answer(hello)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            _answer(actions[message["do"]](message))
        except Exception as error:
            _answer({"error": f"{type(error).__name__}: {error}"})
            raise


def _answer(message: Message) -> None:
    print(MARK + json.dumps(message), flush=True)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell RssAnon")


class PeakWatch:
    """The most anonymous memory since the last reset, looked at every few milliseconds."""

    def __init__(self, pause_s: float = 0.005) -> None:
        self.peak_bytes = anonymous_bytes()
        self._pause_s = pause_s
        threading.Thread(target=self._watch, daemon=True).start()

    def reset(self) -> None:
        """Forgets what was seen."""
        self.peak_bytes = anonymous_bytes()

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())
            time.sleep(self._pause_s)
