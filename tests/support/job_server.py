"""Jobs in processes of their own, to be killed from outside or by themselves."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "killed_job.py"


class Jobs:
    """Starts jobs over one input in processes of their own, one after the other."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self._server = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = 0

    def start(self, output: Path, kill_at: int = 0) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(f"{self.source}\t{output}\t{kill_at}\n")
        self._server.stdin.flush()
        self.pid = int(self.read("pid")[0])

    def read(self, *words: str) -> list[str]:
        """What follows one of `words` in the next line that begins with one of them."""
        assert self._server.stdout is not None
        for line in self._server.stdout:
            word, *values = line.split()
            assert word != "error" or word in words, line
            if word in words:
                return [*values] if len(words) == 1 else [word, *values]
        raise AssertionError("the server has ended")

    def end(self) -> int:
        return int(self.read("end")[0])

    def finish(self, output: Path) -> int:
        """Runs to the end, and returns how many rows that took."""
        self.start(output)
        exit_code, num_rows, duplicates = map(int, self.read("done"))
        assert (exit_code, duplicates, self.end()) == (0, 0, 0)
        return num_rows

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(10)
