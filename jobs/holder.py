"""Who holds the lease of an output folder, and where that is written."""

from dataclasses import dataclass
from pathlib import Path

from batchmla.errors import JobError

STALE_S = 60.0


def lease_path(output: Path) -> Path:
    return output / "_batchmla" / "lease"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has, or had, the lease. `age_s`: since it was last heard of."""

    host: str
    pid: int
    age_s: float

    @property
    def is_stale(self) -> bool:
        """Silent for so long that it is taken to be dead."""
        return self.age_s > STALE_S

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}, seen {max(0.0, self.age_s):.0f} s ago"


def in_use(output: Path, holder: Holder | None) -> JobError:
    """What the second run at an output is told; None: the holder has not named itself."""
    said = holder or "it has not named itself yet"
    return JobError(
        f"{output} is in use by another run ({said}); wait for it or stop it, or choose another "
        f"output.path"
    )


def taken_over(output: Path) -> JobError:
    """What a run is told that was silent for too long."""
    return JobError(
        f"{output} was taken over by another run, as this one gave no sign of life for "
        f"{STALE_S:.0f} s; finished rows are kept, let the other run go on"
    )
