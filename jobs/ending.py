"""How a run ended: its exit code, and the sentence that says why it was not the best one."""

from batchmla.errors import ExitCode
from batchmla.jobs.loop import Loop
from batchmla.jobs.settings import JobSpec


def ending(
    spec: JobSpec, loop: Loop, *, is_complete: bool, num_failed: int, signum: int | None
) -> tuple[ExitCode, str | None]:
    """Of a run that reached its end in order. `is_complete`: every row is in a published part."""
    num_rows = loop.num_rows
    if signum is not None and not is_complete:
        return (
            ExitCode(128 + signum),
            "stopped by a signal; finished rows are saved, the same command goes on",
        )
    if loop.is_stopped_by_failures and not is_complete:
        return (
            ExitCode.ROWS_FAILED,
            f"stopped as the first {loop.finished:,} rows all failed (errors.stop_after); the "
            f"last one: {loop.last_error}",
        )
    if not is_complete:
        return ExitCode.OK, "rows are left; the same command without --limit goes on"
    if num_rows and not spec.errors.allows(num_failed, num_rows):
        return (
            ExitCode.ROWS_FAILED,
            f"{num_failed:,} of {num_rows:,} rows failed, more than errors.max = "
            f"{spec.errors.max} allows; see the column {spec.output.prefix}error, then "
            f"--retry-failed or a higher errors.max",
        )
    return ExitCode.OK, None
