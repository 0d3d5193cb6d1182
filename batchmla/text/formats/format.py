"""What a chat format says about a model's output."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The markers around the reasoning; both None for a format without reasoning."""

    name: str
    start: str | None
    end: str | None
