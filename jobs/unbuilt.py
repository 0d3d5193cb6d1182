"""Values of the job file whose feature is not built yet: one table, refused by name.

A feature is switched on by deleting its lines. Nothing else in the project knows this list.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchmla.jobs.wording import show_value
from batchmla.jobs.yaml_text import KeyPath

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def _is_given(value: Any) -> bool:
    return value is not None


def _is_url(value: Any) -> bool:
    return isinstance(value, str) and _URL.match(value) is not None


def _is_hub(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("hf://")


def _equals(*refused: Any) -> Callable[[Any], bool]:
    def is_refused(value: Any) -> bool:
        return any(value == one and type(value) is type(one) for one in refused)

    return is_refused


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A field, the values refused, and what to do instead."""

    field: str
    refuses: Callable[[Any], bool]
    message: str


UNBUILT = (
    Unbuilt("model.path", _is_url, "give a local folder, a Hugging Face id or builtin:tally"),
    Unbuilt("model.speculative", _equals("mtp"), "leave it at off"),
    Unbuilt("output.path", _is_hub, "give a local folder, s3://BUCKET/… or gs://BUCKET/…"),
)


def unbuilt_faults(raw: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, str]]:
    """The path of every refused value of a job file, with its sentence."""
    for entry in UNBUILT:
        *parents, last = entry.field.split(".")
        section: Any = raw
        for key in parents:
            section = section.get(key) if isinstance(section, Mapping) else None
        if not isinstance(section, Mapping):
            continue
        if last in section and entry.refuses(section[last]):
            shown = f"{entry.field}: {show_value(section[last])}"
            yield (*parents, last), f"{shown} is not built yet; {entry.message}"
