"""The driver's end of the pipe to a worker, which stands still whenever it is not asked."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from race.serve import MARK, Message

_LEAVE_S = 120.0  # a peer's own way out, until it is ended


class Worker:
    """A peer in its own process group; its whole tree is stopped and continued by signals.

    It works in the log's folder: the folders of a checkout must not be taken for packages.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._start_s = time.perf_counter()
        self._log_path = log
        self._log = log.open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment, start_new_session=True, cwd=log.parent,
        )  # fmt: skip
        try:
            self.hello = self._read()
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - self._start_s
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

    def idle_cpu_s(self, pause_s: float = 0.5) -> float:
        """Processor time that the tree takes during a pause in which nobody asks anything."""
        before_s = self._cpu_s()
        time.sleep(pause_s)
        return self._cpu_s() - before_s

    def peak_bytes(self) -> int:
        """The most memory each process of the tree has ever had, summed: files and what they share
        are counted, and counted for each.
        """
        total = 0
        for process in self._tree():
            with suppress(OSError):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return 1024 * total

    def leave(self) -> float:
        """Lets the worker end by itself; seconds since it was started."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_LEAVE_S)
        seconds = time.perf_counter() - self._start_s
        self.close()
        return seconds

    def close(self) -> None:
        """Ends the worker and what it started."""
        tree = self._tree()
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._log.close()

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def _cpu_s(self) -> float:
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _signal(self, number: signal.Signals) -> None:
        """To the group, and to those of the tree that have left it."""
        outside = [each for each in self._tree() if _group_of(each.pid) != self._process.pid]
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        for process in outside:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

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


def _group_of(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
