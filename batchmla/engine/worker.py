"""The process of a rank that follows: it does every step that rank 0 sends, and says how it is.

Rank 0 sends work through the ranks' control group. `serve` is a follower's whole work, told to
whoever listens; `follow` does it in a spawned process, which has a pipe back to rank 0's, on which
it shows every second that it lives, and once how it ended.
"""

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from typing import Literal, NoReturn

import torch

from batchmla.engine.build import RankPlan, build_forward
from batchmla.engine.forward import Work, is_out_of_memory, out_of_memory
from batchmla.errors import BatchmlaError, ExitCode
from batchmla.parallel import LostPeer, Meeting, Par

BEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`alive`: nothing new. `here`: the process runs. `ready`: weights and cache are there.
    `log`: a line for the log. `lost`: the rank ends because another one did. `failed`: it ends;
    `text` is a sentence for the user or, with `INTERNAL`, a traceback.
    """

    kind: Literal["alive", "here", "ready", "log", "failed", "lost"]
    text: str = ""
    level: int = logging.INFO
    exit_code: int = ExitCode.INTERNAL


class Pipe:
    """The way back to rank 0's process, for several threads."""

    def __init__(self, sender: connection.Connection) -> None:
        self._sender = sender
        self._lock = threading.Lock()

    def send(self, report: Report) -> None:
        """Nobody listens any more: not this rank's concern."""
        with self._lock:
            try:
                self._sender.send(report)
            except OSError:
                return


Tell = Callable[[Report], None]


class _Lines(logging.Handler):
    """Log lines on their way to rank 0."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(Report(kind="log", text=record.getMessage(), level=record.levelno))


def follow(
    plan: RankPlan, meeting: Meeting, num_threads: int, sender: connection.Connection
) -> None:
    """The whole life of a follower; to be run in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Pipe(sender)
    _in_background(_end_with_parent)
    _in_background(lambda: _beat(pipe))
    pipe.send(Report(kind="here"))
    serve(plan, meeting, num_threads, pipe.send)


def serve(plan: RankPlan, meeting: Meeting, num_threads: int, tell: Tell) -> None:
    """Joins the others, loads the rank's part and does all steps; ends with telling why."""
    logging.basicConfig(level=logging.INFO, handlers=[_Lines(tell)], force=True)
    torch.set_num_threads(num_threads)
    try:
        _work(plan, meeting, tell)
    except LostPeer:
        tell(Report(kind="lost"))
    except BatchmlaError as error:
        tell(Report(kind="failed", text=str(error), exit_code=error.exit_code))
    except BaseException:
        tell(Report(kind="failed", text=traceback.format_exc()))


@torch.inference_mode()
def _work(plan: RankPlan, meeting: Meeting, tell: Tell) -> NoReturn:
    """One step after the other, until this process is ended."""
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
    par = Par.connect(plan.config.placement, meeting, is_ordered=plan.config.deterministic)
    forward = build_forward(plan, par)
    tell(Report(kind="ready"))
    while True:
        work: Work = par.broadcast(None)
        try:
            for _ in forward.run(work):
                pass
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(work.num_tokens) from error


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _beat(pipe: Pipe) -> None:
    pause = threading.Event()
    while not pause.wait(BEAT_S):
        pipe.send(Report(kind="alive"))


def _end_with_parent() -> None:
    """No rank outlives the process that started it."""
    parent = parent_process()
    assert parent is not None, "a follower is started by another process"
    connection.wait([parent.sentinel])
    os._exit(ExitCode.NO_DEVICE)
