"""Where `batchmla report` writes when no place is given."""

from pathlib import Path


def report_path(output: Path) -> Path:
    """Among our own files of an output folder."""
    return output / "_batchmla" / "report.html"
