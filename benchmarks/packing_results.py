"""The file of simulated outcomes: each run puts its rows in the place of those it has run again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NAMES = ("trace", "rows", "lengths", "machine", "case", "order")
_DIGITS = 4

Result = dict[str, Any]


def keep(path: Path, overlap: str, found: Sequence[Result]) -> None:
    """Writes outcomes for devices that overlap so much; others in the file stay."""
    every: dict[str, list[Result]] = json.loads(path.read_text()) if path.exists() else {}
    key = f"overlap_{overlap}"
    new = {_name(each): _rounded(each) for each in found}
    kept = [each for each in every.get(key, []) if _name(each) not in new]
    every[key] = [*kept, *new.values()]
    path.write_text(json.dumps(every, indent=1) + "\n")


def _name(result: Result) -> tuple[Any, ...]:
    return tuple(result.get(name) for name in _NAMES)


def _rounded(result: Result) -> Result:
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in result.items()
    }
