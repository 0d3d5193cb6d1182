"""The most memory that this process took since a moment, for comparison with the estimate.

On a GPU what torch allocated; else the resident set of the process beyond what it was. Where the
system keeps no such mark, it is the highest of the process's whole life.
"""

import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

from batchmla.kernels.cpu.heap import give_back

_RESET_PEAK = "5"  # proc(5), clear_refs: the peak of the resident set starts again


class PeakMemory:
    """Begins to measure when it is made."""

    def __init__(self, device: torch.device, proc: Path = Path("/proc/self")) -> None:
        self._device = device
        self._proc = proc
        self._base_bytes = 0
        self.restart()
        if device.type == "cuda":
            self._base_bytes = torch.cuda.memory_allocated(device)
        else:
            self._base_bytes = self._resident("VmRSS") or 0

    def restart(self) -> None:
        """Forgets the peak, not what was taken before the start."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        give_back()  # or what is taken next may be memory that the process has already
        with suppress(OSError):  # then the peak is that of the process's whole life
            (self._proc / "clear_refs").write_text(_RESET_PEAK)

    def peak_bytes(self) -> int:
        """The most bytes taken beyond those at the start; 0 where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._base_bytes
        peak_bytes = self._resident("VmHWM")
        if peak_bytes is None:
            peak_bytes = _life_peak_bytes()
        return max(0, peak_bytes - self._base_bytes)

    def _resident(self, name: str) -> int | None:
        try:
            text = (self._proc / "status").read_text()
        except OSError:
            return None
        found = re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE)
        return None if found is None else int(found[1]) * 1024


def _life_peak_bytes() -> int:
    """By getrusage, which counts in KiB, but on macOS in bytes."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
