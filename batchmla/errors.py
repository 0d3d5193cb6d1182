"""Errors a user can cause: one sentence that says what, where and the way out.

The command line prints the sentence without a traceback and ends with `exit_code`.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process tells its scheduler."""

    OK = 0
    ROWS_FAILED = 1
    BAD_JOB = 2
    NO_DEVICE = 3
    STORAGE = 4
    INTERNAL = 70
    SIGINT = 130
    SIGTERM = 143


class BatchmlaError(Exception):
    """Base of every error with a message made for the user."""

    exit_code = ExitCode.INTERNAL


class JobError(BatchmlaError):
    """The job file, the model or the input is wrong, or a resume was refused."""

    exit_code = ExitCode.BAD_JOB


class DeviceError(BatchmlaError):
    """It does not fit in memory, or a device or rank is missing or lost."""

    exit_code = ExitCode.NO_DEVICE


class StorageError(BatchmlaError):
    """The output cannot be written: full, read-only or unreachable."""

    exit_code = ExitCode.STORAGE
