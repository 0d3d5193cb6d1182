"""The other ranks of a model: started, watched, ended, wherever their processes are.

A rank that dies or hangs takes the engine with it, as a `LostPeer` that says which and why: the
collective that rank 0 waits in fails as soon as the watch has ended the others.
"""

import atexit
import logging
import threading
import time
from typing import Literal, Protocol

import torch

from batchmla.engine.build import RankPlan
from batchmla.engine.forward import Work
from batchmla.engine.hardware import Hardware
from batchmla.engine.worker import Report
from batchmla.errors import DeviceError, ExitCode, JobError
from batchmla.parallel import LostPeer, Meeting, Par

logger = logging.getLogger(__name__)

Stage = Literal["here", "ready"]  # the process runs; it has its weights
STAGES: tuple[Stage, ...] = ("here", "ready")
ROUND_S = 0.25  # of the watch
MOST_ROUND_S = 2 * ROUND_S  # that a round counts: while this process is stopped, nobody is silent
SILENCE_S = 15.0  # without a sign of life, after which a rank hangs
START_S = 120.0  # the same until its process runs: imports may come from a slow disk
BLAME_S = 5.0  # for the watch to find why a step failed


class Follower(Protocol):
    """The process of another rank. Nothing here blocks but `join`."""

    def reports(self) -> list[Report]:
        """What it said since it was last asked."""
        ...

    @property
    def end(self) -> str | None:
        """How it ended, as in "was ended by SIGKILL"; None while it lives."""
        ...

    def kill(self) -> None:
        """Ends it, in whatever state it is."""
        ...

    def join(self) -> None:
        """Waits for its end."""
        ...


class Launch(Protocol):
    """How the processes of other ranks come to be."""

    @property
    def hardware(self) -> Hardware | None:
        """Of all ranks; None: this machine's."""
        ...

    @property
    def device_index(self) -> int | None:
        """Of each rank's GPU among those that its process sees; None: its rank."""
        ...

    @property
    def meeting(self) -> Meeting:
        """Where the others meet this process, which is rank 0."""
        ...

    def start(self, plan: RankPlan, num_threads: int) -> Follower:
        """Begins the process of the rank of `plan`; does not wait for it."""
        ...

    def failed(self, fault: Exception) -> None:
        """Is told the fault that ends all ranks, while this one may still wait for them."""
        ...

    def close(self) -> None:
        """Frees what is left when all have ended."""
        ...


class Ranks:
    """Followers of this process, which is rank 0."""

    def __init__(self, plan: RankPlan, launch: Launch) -> None:
        """Starts them and joins them; each begins to load. Raises the fault of one that fails."""
        placement = plan.config.placement
        self._launch = launch
        self._fault: Exception | None = None
        self._bereft = set[int]()  # ranks that ended because another did
        self._is_ending = threading.Event()
        self._par: Par | None = None
        self._missing = {stage: set(range(1, placement.num_ranks)) for stage in STAGES}
        self._reached = {stage: threading.Event() for stage in STAGES}  # or there is a fault
        self._followers: dict[int, Follower] = {}
        atexit.register(self.close)
        self._threads_before = torch.get_num_threads()
        num_threads = max(1, self._threads_before // placement.num_ranks)
        for rank in range(1, placement.num_ranks):
            self._followers[rank] = launch.start(plan.of_rank(rank), num_threads)
        torch.set_num_threads(num_threads)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()
        self._join(plan)

    def _join(self, plan: RankPlan) -> None:
        self.wait_until("here")
        is_ordered = plan.config.deterministic
        try:
            self._par = Par.connect(
                plan.config.placement, self._launch.meeting, is_ordered=is_ordered
            )
        except DeviceError as error:
            raise self.explain(error) from error
        self._par.fault = lambda: self._fault

    @property
    def par(self) -> Par:
        """Rank 0's way to the others."""
        assert self._par is not None, "not joined"
        return self._par

    def wait_until(self, stage: Stage) -> None:
        """Until every follower is there; raises the fault of one that failed on the way."""
        self._reached[stage].wait()
        if self._fault is not None:
            self.close()
            raise self._fault

    def send(self, work: Work) -> None:
        """See `Followers`."""
        if self._fault is not None:
            raise self._fault
        self.par.broadcast(work)

    def explain(self, error: DeviceError) -> Exception:
        """See `Followers`."""
        until_s = time.monotonic() + BLAME_S
        while self._fault is None and time.monotonic() < until_s:
            time.sleep(0.05)
        self.close()
        return self._fault or error

    def close(self) -> None:
        """Ends every follower, wherever it is: it keeps nothing that would be lost."""
        if self._is_ending.is_set():
            return
        self._is_ending.set()
        atexit.unregister(self.close)
        self._kill()
        for each in self._followers.values():
            each.join()
        if self._par is not None:
            self._par.close()
        torch.set_num_threads(self._threads_before)
        self._launch.close()

    def _kill(self) -> None:
        for each in self._followers.values():
            each.kill()

    # the watch's thread

    def _watch(self) -> None:
        """Notes the first fault and ends all ranks then, so that nobody waits for ever."""
        silent_s = dict.fromkeys(self._followers, 0.0)
        looked_s = time.monotonic()
        while not self._is_ending.wait(ROUND_S) and self._fault is None:
            round_s = min(time.monotonic() - looked_s, MOST_ROUND_S)
            looked_s = time.monotonic()
            for rank, follower in self._followers.items():
                end = follower.end  # before its last report
                reports = follower.reports()
                silent_s[rank] = 0.0 if reports else silent_s[rank] + round_s
                for report in reports:
                    self._take(rank, report)
                if self._fault is None and not self._is_ending.is_set():
                    self._fault = self._judge(rank, end, silent_s[rank])
        if self._fault is not None:
            self._launch.failed(self._fault)
            self._kill()
        for reached in self._reached.values():
            reached.set()

    def _take(self, rank: int, report: Report) -> None:
        if report.kind == "log":
            logger.log(report.level, "rank %d: %s", rank, report.text)
        elif report.kind == "failed":
            self._fault = self._fault or _fault_of(rank, report)
        elif report.kind == "lost":
            self._bereft.add(rank)
        elif report.kind == "here" or report.kind == "ready":
            self._missing[report.kind].discard(rank)
            if not self._missing[report.kind]:
                self._reached[report.kind].set()

    def _judge(self, rank: int, end: str | None, silent_s: float) -> Exception | None:
        """What is wrong with a rank that said nothing of a fault."""
        if rank in self._bereft:
            return None
        if end is not None:
            return LostPeer(
                f"rank {rank} {end}; run the same command again to go on with the rows left, after "
                "a look at the system's log (the kernel's out-of-memory killer also does this)"
            )
        allowed_s = START_S if rank in self._missing["here"] else SILENCE_S
        if silent_s >= allowed_s:
            return LostPeer(
                f"rank {rank} has given no sign of life for {allowed_s:.0f} s; run the same "
                "command again to go on with the rows left"
            )
        return None


def _fault_of(rank: int, report: Report) -> Exception:
    """The error that a rank ended with, as rank 0 raises it."""
    if report.exit_code == ExitCode.BAD_JOB:
        return JobError(f"rank {rank}: {report.text}")
    if report.exit_code == ExitCode.NO_DEVICE:
        return DeviceError(f"rank {rank}: {report.text}")
    return RuntimeError(f"rank {rank} failed:\n{report.text}")
