"""Memory that is given back stays with the process.

Every step frees what its products gave, and asks for as much again. By default large blocks go back
to the system each time, which clears their pages when they are touched anew.
"""

import ctypes
import sys
from typing import Any

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # the C library's names of its settings
KEPT_BYTES = 1 << 30
LARGEST_BYTES = 32 << 20  # of a block; the C library takes no more


def keep_freed() -> bool:
    """Blocks of up to 32 MiB are taken from memory the process has, of which at most 1 GiB stays
    unused; returns whether the C library did as it was asked."""
    mallopt = _of_c_library("mallopt")
    if mallopt is None:
        return False
    return all(
        mallopt(setting, value) == 1
        for setting, value in (
            (MMAP_THRESHOLD, LARGEST_BYTES),
            (TRIM_THRESHOLD, KEPT_BYTES),
            (TOP_PAD, LARGEST_BYTES),
        )
    )


def give_back() -> None:
    """What is unused now goes back to the system, so that what is taken from here on shows."""
    malloc_trim = _of_c_library("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


def _of_c_library(name: str) -> Any:
    """A function that glibc has and other libraries have not; None there."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)
