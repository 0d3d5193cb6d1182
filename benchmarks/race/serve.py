"""Both ends of the pipe to a worker: one JSON object a line, told apart from a library's chatter.

The worker's end has no dependencies, since it also runs in the peer's own environment.
"""

import json
import os
import signal
import subprocess
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


class Worker:
    """A peer in its own process group, which stands still whenever it is not asked.

    It works in the log's folder: the folders of a checkout must not be taken for packages.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        start_s = time.perf_counter()
        self._log_path = log
        self._log = log.open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment, start_new_session=True, cwd=log.parent,
        )  # fmt: skip
        self.hello = self._read()
        self.load_s = time.perf_counter() - start_s
        self._signal(signal.SIGSTOP)

    def ask(self, do: str, **fields: Any) -> Message:
        """One action, while all other workers stand still."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Ends the worker and what it started."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _read(self) -> Message:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: Message = json.loads(line[len(MARK) :])
                if "error" in answer:
                    raise RuntimeError(f"{answer['error']}; see {self._log_path}")
                return answer
            self._log.write(line)
        raise RuntimeError(f"the worker ended with {self._process.wait()}; see {self._log_path}")
