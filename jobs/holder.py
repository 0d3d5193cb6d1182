"""Who holds the lease of an output folder, and where that is written."""

from dataclasses import dataclass
from pathlib import Path

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
