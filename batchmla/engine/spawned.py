"""Ranks as processes of this machine: spawned here, each with a pipe back, met in a file."""

import multiprocessing
import shutil
import signal
import tempfile
from functools import cached_property
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from batchmla.engine.build import RankPlan
from batchmla.engine.hardware import Hardware
from batchmla.engine.ranks import Follower
from batchmla.engine.worker import Report, follow


class Spawned:
    """A `Launch`. The ranks end with this process; `meeting` makes a folder when first asked."""

    hardware: Hardware | None = None
    device_index: int | None = None

    @cached_property
    def meeting(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="batchmla-ranks-")) / "store"

    def start(self, plan: RankPlan, num_threads: int) -> Follower:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=follow,
            args=(plan, self.meeting, num_threads, sender),
            name=f"batchmla rank {plan.config.placement.rank}",
            daemon=True,
        )
        process.start()
        sender.close()
        return _Child(process, receiver)

    def failed(self, fault: Exception) -> None:
        """What this process waits in fails with the ends of the others."""

    def close(self) -> None:
        shutil.rmtree(self.meeting.parent, ignore_errors=True)


class _Child:
    """A `Follower`."""

    def __init__(self, process: SpawnProcess, pipe: connection.Connection) -> None:
        self._process = process
        self._pipe = pipe

    def reports(self) -> list[Report]:
        reports: list[Report] = []
        try:
            while self._pipe.poll():
                reports.append(self._pipe.recv())
        except (EOFError, OSError):
            pass
        return reports

    @property
    def end(self) -> str | None:
        code = self._process.exitcode
        if code is None:
            return None
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()

    def join(self) -> None:
        self._process.join()
