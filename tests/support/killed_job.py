"""A job in a process that may be killed, for the crash test: a server that forks one a line.

stdin   INPUT OUTPUT KILL_AT        separated by tabs; KILL_AT 0: never
stdout  pid N                       of the fork
        started                     its engine has finished a row
        done EXIT_CODE ROWS DUPLICATES
        end STATUS                  as of waitpid, -9 for SIGKILL

KILL_AT k: the job ends itself with SIGKILL before its k-th effect on the disk, or in its middle.
"""

import os
import sys
from pathlib import Path

from faults import FaultStore, kill
from scripted import ScriptedEngine, run_scripted, scripted_seams, scripted_spec

from batchmla.jobs.journal import Pace


def say(text: str) -> None:
    """One write, so that lines of two processes do not mix."""
    os.write(1, f"{text}\n".encode())


def run(source: Path, output: Path, kill_at: int) -> None:
    def note(num_done: int) -> None:
        if num_done == 1:
            say("started")

    engine = ScriptedEngine(delay_s=0.0003, on_completion=note)
    seams = scripted_seams(
        engine, store=lambda root: FaultStore(root, kill_at, kill), pace=Pace(rows=30)
    )
    summary = run_scripted(scripted_spec(source, output, output={"token_ids": True}), seams)
    say(f"done {summary.exit_code} {summary.rows_this_run} {summary.duplicates}")


def main() -> None:
    for line in sys.stdin:
        source, output, kill_at = line.strip().split("\t")
        pid = os.fork()
        if pid == 0:
            try:
                run(Path(source), Path(output), int(kill_at))
            except BaseException as error:
                say(f"error {error!r}")
                os._exit(1)
            os._exit(0)
        say(f"pid {pid}")
        say(f"end {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


if __name__ == "__main__":
    main()
