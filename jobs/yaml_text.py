"""YAML 1.2 with the core schema, read into plain values that remember their lines.

`on`, `off`, `yes`, `no` are text, `1e-3` is a number, a date is text, a key given
twice is an error. It knows nothing of job files.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from batchmla.errors import JobError

KeyPath = tuple[str, ...]

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_INF = re.compile(r"[-+]?\.(?:inf|Inf|INF)\Z")
_NAN = re.compile(r"\.(?:nan|NaN|NAN)\Z")
_MAX_NODES = 100_000  # aliases may multiply a small text


@dataclass(frozen=True, slots=True)
class YamlText:
    """A parsed document: its value, and the 1-based line of every key below the top."""

    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)


def parse_yaml(text: str, where: str) -> YamlText:
    """The one document of `text`; `where` (a file name, or "--set a.b") opens every error."""
    try:
        reader = _Reader(YAML(typ="safe", pure=True).parse(text), where)
        return reader.document()
    except MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise JobError(f"{where}{line}: not valid YAML: {fault.problem or fault.context}") from None
    except (YAMLError, RecursionError) as fault:
        raise JobError(f"{where}: not valid YAML: {' '.join(str(fault).split())}") from None


def core_scalar(text: str) -> Any:
    """A plain (unquoted) scalar under the core schema of YAML 1.2.2, section 10.3.2."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text[0] in "tT"
    if _INT.match(text):
        return int(text, 0) if text.startswith(("0o", "0x")) else _decimal(text)
    if _FLOAT.match(text):
        return float(text)
    if _INF.match(text):
        return float("-inf") if text.startswith("-") else float("inf")
    if _NAN.match(text):
        return float("nan")
    return text


def _decimal(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:  # beyond Python's digit limit
        return text


class _Reader:
    """One pass over the parser's events; anchors hold finished values."""

    def __init__(self, events: Iterator[Any], where: str) -> None:
        self._events = events
        self._where = where
        self._anchors: dict[str, Any] = {}
        self._lines: dict[KeyPath, int] = {}
        self._num_nodes = 0

    def document(self) -> YamlText:
        value: Any = None
        num_documents = 0
        for event in self._events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent":
                num_documents += 1
                if num_documents > 1:
                    raise self._fault(event, "a second document begins; one file is one document")
                value = self._node(next(self._events), ())
        return YamlText(value, self._lines)

    def _fault(self, event: Any, what: str) -> JobError:
        return JobError(f"{self._where}, line {event.start_mark.line + 1}: {what}")

    def _node(self, event: Any, path: KeyPath) -> Any:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise self._fault(event, f"more than {_MAX_NODES} values")
        kind = type(event).__name__
        if kind == "AliasEvent":
            if event.anchor not in self._anchors:
                raise self._fault(event, f"*{event.anchor} names no anchor above it")
            return self._anchors[event.anchor]
        if kind == "ScalarEvent":
            value = self._scalar(event)
        elif kind == "SequenceStartEvent":
            self._check_tag(event, "seq")
            value = self._sequence(path)
        else:
            self._check_tag(event, "map")
            value = self._mapping(path)
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _check_tag(self, event: Any, allowed: str) -> None:
        if event.tag not in (None, "!", _TAG + allowed):
            raise self._fault(event, f"the tag {event.tag} is not known here; leave it out")

    def _scalar(self, event: Any) -> Any:
        if event.tag is None and event.implicit[0]:
            return core_scalar(event.value)
        if event.tag not in (None, "!", _TAG + "str"):
            raise self._fault(event, f"the tag {event.tag} is not known here; leave it out")
        try:  # "\ud83e\udd99" is how JSON spells one character
            return str(event.value).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise self._fault(
                event, "a lone surrogate (\\ud800 to \\udfff) is no character; write the other half"
            ) from None

    def _sequence(self, path: KeyPath) -> list[Any]:
        values: list[Any] = []
        for event in self._events:
            if type(event).__name__ == "SequenceEndEvent":
                break
            values.append(self._node(event, (*path, str(len(values)))))
        return values

    def _mapping(self, path: KeyPath) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for event in self._events:
            if type(event).__name__ == "MappingEndEvent":
                break
            key = self._node(event, path)
            if isinstance(key, list | dict):
                raise self._fault(
                    event, "a key must be a plain word; text that begins with { needs quotes"
                )
            shown = ".".join((*path, str(key)))
            if key in values:
                raise self._fault(event, f"the key {shown} is given twice")
            self._lines[(*path, str(key))] = event.start_mark.line + 1
            values[key] = self._node(next(self._events), (*path, str(key)))
        return values
