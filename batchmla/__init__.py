"""Offline batch inference for DeepSeek-class models: Parquet in, reasoning and content out.

`Engine` and `JobSpec` are here for programs and notebooks; they are loaded when first asked for.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = ["Engine", "JobSpec", "__version__"]


def __getattr__(name: str) -> Any:
    homes = {"Engine": "batchmla.api", "JobSpec": "batchmla.jobs.settings"}
    if name in homes:
        return getattr(import_module(homes[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
