"""The pieces of the race, each a measurement that can be taken by itself.

| written | what it measures |
| --- | --- |
| race:decode | engine time of a job: loaded peers in turns |
| race:decode/8 | the same on every eighth row, with transformers |
| race:realistic:process | whole processes in turns: start, load, run, end |
| race:decode:profile | where the time of this engine's ops goes |
| race:memory | this engine's planned and measured memory |
| race:sweep | which settings are vLLM's best; pieces after it use them |
"""

import re
from dataclasses import dataclass

from race.model import MODELS
from race.workloads import JOBS, WORKLOADS

KINDS = ("engine", "process", "profile", "memory", "sweep")
_OF_EACH_MODEL = (
    "sweep", "mixed", "decode", "prefix", "realistic", "mixed/16", "decode/16", "prefix/16",
    "realistic/100", "realistic:process",
)  # fmt: skip
DEFAULT = (
    *(f"{model}:{rest}" for model in MODELS for rest in _OF_EACH_MODEL),
    *(f"race:{job}:profile" for job in WORKLOADS),
    "race:memory",
)


@dataclass(frozen=True)
class Piece:
    """`job` is empty where the kind has none; `scale`: only every so manieth row."""

    model: str
    kind: str
    job: str = ""
    scale: int = 1

    @property
    def name(self) -> str:
        """As it is written."""
        if self.kind in ("memory", "sweep"):
            return f"{self.model}:{self.kind}"
        job = self.job if self.scale == 1 else f"{self.job}/{self.scale}"
        return f"{self.model}:{job}" + ("" if self.kind == "engine" else f":{self.kind}")


def parse_piece(text: str) -> Piece:
    """Reads a name; a `ValueError` says what is wrong with it."""
    model, _, rest = text.partition(":")
    if model not in MODELS:
        raise ValueError(f"{text}: no model {model!r}; there are {', '.join(MODELS)}")
    if rest in ("memory", "sweep"):
        return Piece(model, rest)
    found = re.fullmatch(r"([a-z]+)(?:/([1-9]\d*))?(?::(process|profile))?", rest)
    if found is None or found[1] not in JOBS:
        raise ValueError(f"{text}: no job {rest!r}; there are {', '.join(JOBS)}")
    return Piece(model, found[3] or "engine", found[1], int(found[2] or 1))
