"""A job from a store into a store: in this process, or in one that kills itself.

As a script it is a server that forks one job a line:

stdin   INPUT OUTPUT KILL_AT WORDS WHEN   separated by tabs; KILL_AT 0: never
stdout  struck EFFECT NAME                before the process ends itself
        end STATUS                        as of waitpid, -9 for SIGKILL

KILL_AT k: SIGKILL at the k-th effect on the store whose kind and name begin with WORDS, WHEN it is
"before" it, or "after" the store has done it and before anybody knows.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scripted import ScriptedEngine, run_scripted, scripted_seams, scripted_spec

from batchmla.jobs.journal import Pace
from batchmla.jobs.read import open_job_input
from batchmla.jobs.remote_calls import Patience
from batchmla.jobs.remote_store import RemoteStore
from batchmla.jobs.store import Effect, Store
from batchmla.jobs.summary import Summary

QUICK = Patience(total_s=20.0, first_wait_s=0.01, most_wait_s=0.1)


class DyingStore(RemoteStore):
    """Ends its process at the k-th effect of a kind."""

    def __init__(self, root: Path, kill_at: int, words: str, when: str) -> None:
        super().__init__(root, QUICK)
        self._at, self._words, self._is_after = kill_at, words, when == "after"
        self._count = 0
        self._is_struck = self._is_due = False
        self._counting = threading.Lock()

    def before(self, effect: Effect, path: Path, source: Path | None = None) -> None:
        super().before(effect, path, source)
        if threading.current_thread().name == "soft":
            return  # when these come is a matter of time
        with self._counting:
            self._count += f"{effect} {path.name}".startswith(self._words)
            if self._count == self._at and not self._is_struck:
                self._is_struck = True
                os.write(1, f"struck {effect} {path.name}\n".encode())
                if not self._is_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._is_due = True

    def _call(self, target: Path, action: Callable[[], object], *rest: Any) -> None:
        super()._call(target, action, *rest)
        if self._is_due:
            os.kill(os.getpid(), signal.SIGKILL)


def run_remote(
    source: str,
    output: str,
    engine: ScriptedEngine | None,
    store: Callable[[Path], Store] = lambda root: RemoteStore(root, QUICK),
    wishes: dict[str, Any] | None = None,
    **sections: Any,
) -> Summary:
    """Runs the job over `source`; without an engine it must not need one."""
    seams = scripted_seams(engine, store=store, pace=Pace(rows=20))
    own = {"input": {"path": source}, "output": {"path": output, "rows_per_file": 25}}
    for name, section in own.items():
        sections[name] = section | sections.get(name, {})
    loaded = scripted_spec(Path(), Path(), **sections)
    return run_scripted(loaded, replace(seams, table=open_job_input), **wishes or {})


class KilledJobs:
    """Runs jobs that are killed, one after the other."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, source: str, output: str, kill_at: int, words: str = "", when: str = "before"
    ) -> tuple[str, int]:
        """At which effect it was killed ("" where it was not), and how the process ended."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write("\t".join((source, output, str(kill_at), words, when)) + "\n")
        self._server.stdin.flush()
        struck = ""
        for line in self._server.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "end":
                return struck, int(rest)
            assert word == "struck", line
            struck = rest
        raise AssertionError("the server has ended")

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(10)


def main() -> None:
    import s3fs  # noqa: F401, RUF100 - before the forks, as it takes a while

    for line in sys.stdin:
        source, output, kill_at, words, when = line.strip().split("\t")
        make = partial(DyingStore, kill_at=int(kill_at), words=words, when=when)
        pid = os.fork()
        if pid == 0:
            try:
                run_remote(source, output, ScriptedEngine(), make)
            except BaseException as error:
                os.write(1, f"error {error!r}\n".encode())
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(1, f"end {status}\n".encode())


if __name__ == "__main__":
    main()
