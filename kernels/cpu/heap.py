"""Memory that is given back stays with the process.

Every step frees what its products gave, and asks for as much again. By default large blocks go back
to the system each time, which clears their pages when they are touched anew.
"""

import ctypes
import ctypes.util
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # the C library's names of its settings
KEPT_BYTES = 1 << 30
LARGEST_BYTES = 32 << 20  # of a block; the C library takes no more


def keep_freed() -> bool:
    """Blocks of up to 32 MiB are taken from memory the process has, of which at most 1 GiB stays
    unused; returns whether the C library did as it was asked."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; other libraries have none
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
