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
from ruamel.yaml.reader import ReaderError

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

_WORDS = (  # how a complaint of the parser begins, and what it means
    ("expected ',' or ']'", "a list that begins with [ is not closed, or a comma is missing"),
    ("expected ',' or '}'", "a map that begins with { is not closed, or a comma is missing"),
    ("expected '<document start>'", "a bracket closes that none opened, or text follows a value"),
    ("found character '\\t'", "a tab cannot indent; use spaces"),
    ("found character '\t'", "a tab cannot indent; use spaces"),
    ("found character '", "text that begins with @, ` or % needs quotes"),
    ("found unexpected end of stream", "a quoted text is not closed"),
    ("mapping values are not allowed", "a colon where no key can be; text with a colon and a space "
     "inside needs quotes"),
    ("expected chomping", "after | or > the text begins on the next line"),
    ("expected <block end>", "this line does not fit the indentation of those above it"),
    ("could not find expected ':'", "a key without a colon behind it"),
)  # fmt: skip


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
        words = _in_words(fault.problem or fault.context or "it cannot be read")
        raise JobError(f"{where}{line}: not valid YAML: {words}") from None
    except ReaderError as fault:
        code = fault.character if isinstance(fault.character, int) else ord(fault.character)
        raise JobError(
            f"{where}: not valid YAML: the character U+{code:04X} is not allowed; remove it"
        ) from None
    except RecursionError:
        raise JobError(f"{where}: not valid YAML: it is nested too deeply") from None
    except YAMLError as fault:
        raise JobError(f"{where}: not valid YAML: {' '.join(str(fault).split())}") from None


def _in_words(problem: str) -> str:
    """A parser's complaint as what to do."""
    return next((words for start, words in _WORDS if problem.startswith(start)), "") or _bare(
        problem
    )


def _bare(problem: str) -> str:
    """A complaint that has no words of ours, without Python's way of writing."""
    bare = re.sub(r"\('([^']*)',?\)", r"'\1'", problem)
    return re.sub(r"'(<stream end>|\\x00|\x00)'", "the end of the text", bare)


def key_word(key: Any) -> str:
    """A key as a job file spells it."""
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(key)


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
            shown = ".".join((*path, key_word(key)))
            if key in values:
                raise self._fault(event, f"the key {shown} is given twice")
            self._lines[(*path, key_word(key))] = event.start_mark.line + 1
            values[key] = self._node(next(self._events), (*path, key_word(key)))
        return values
