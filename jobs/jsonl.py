"""JSONL: one object a line; and what is wrong with a line.

Only LF ends a line (a CR before it is dropped). A byte order mark at the start of a file and blank
lines are skipped. A line that is no object, holds a key twice or is not UTF-8 is malformed.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchmla.jobs.input_file import InputFile
from batchmla.jobs.jsonl_types import Kind, fits, is_mixed, settle, to_arrow_value, widen
from batchmla.jobs.lines import CutShort, read_lines
from batchmla.jobs.text_form import MalformedRecord, Record

logger = logging.getLogger(__name__)

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonlForm:
    """One object a line; its keys are the columns."""

    name = "JSONL"

    def records(self, file: InputFile) -> Iterator[Record]:
        """The lines that are not blank."""
        row = 0
        try:
            for line, raw in read_lines(file):
                if not raw.isspace():
                    yield Record(row, line, len(raw), raw)
                    row += 1
        except CutShort as fault:
            raise fault.as_error(file, row) from None

    def parse(self, record: Record) -> tuple[dict[str, Any], str | None]:
        """The object, with U+FFFD for lone surrogates and a sentence about them."""
        return replace_surrogates(record.data, parse_line(record.data))

    def default_id(self, files: tuple[InputFile, ...]) -> str | None:
        """`id` if the first readable row of the input has it."""
        for file in files:
            for record in self.records(file):
                try:
                    return "id" if "id" in parse_line(record.data) else None
                except MalformedRecord:
                    continue
        return None

    def first_kinds(self, files: tuple[InputFile, ...]) -> dict[str, Kind]:
        """None: columns come in the order of their first appearance."""
        return {}

    def typed_id(self, values: Mapping[str, Any], column: str, error: str | None) -> str | int:
        """Text or a whole number."""
        value = values.get(column)
        if value is None:
            state = "null" if column in values else "missing"
            raise MalformedRecord(f"the id column {column} is {state}")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise MalformedRecord(f"the id column {column} is neither text nor a whole number")
        if error is not None and isinstance(value, str) and "\ufffd" in value:
            raise MalformedRecord(f"the id column {column} holds a lone surrogate")
        return value

    def widen(self, kind: Kind, value: Any) -> Kind:
        """See `jsonl_types`."""
        return widen(kind, value)

    def settle(self, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
        """Types of columns; says which become JSON text."""
        mixed = sorted(name for name, kind in kinds.items() if is_mixed(kind))
        if mixed:
            logger.warning(
                "input columns with values of different types are carried as JSON text: %s",
                ", ".join(mixed),
            )
        return {name: settle(kind) for name, kind in kinds.items()}

    def fits(self, kind: Kind, value: Any) -> bool:
        """See `jsonl_types`."""
        return fits(kind, value)

    def row_value(self, kind: Kind | None, value: Any) -> Any:
        """As in the file."""
        return value

    def arrow_value(self, kind: Kind, value: Any) -> Any:
        """See `jsonl_types`."""
        return to_arrow_value(kind, value)


def parse_line(raw: bytes) -> dict[str, Any]:
    """The object of a line. NaN and Infinity, which pandas writes, are read as numbers."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        byte = raw[fault.start]
        raise MalformedRecord(f"byte 0x{byte:02x} at position {fault.start} is not UTF-8") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as fault:
        raise MalformedRecord(f"not valid JSON: {fault.msg} at character {fault.colno}") from None
    except RecursionError:
        raise MalformedRecord("not usable JSON: nested too deeply") from None
    except MalformedRecord:
        raise
    except ValueError:  # beyond Python's digit limit
        raise MalformedRecord("not usable JSON: a number has thousands of digits") from None
    if not isinstance(value, dict):
        kind = {list: "a list", str: "text", bool: "a boolean", type(None): "null"}
        raise MalformedRecord(f"{kind.get(type(value), 'a number')}, not an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise MalformedRecord(f"the key {json.dumps(twice)} is given twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def replace_surrogates(raw: bytes, values: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """`values` with U+FFFD for every lone surrogate, and a sentence if there was one."""
    if b"\\u" not in raw or not _SURROGATE_ESCAPE.search(raw):
        return values, None
    clean: dict[str, Any] = {}
    found: str | None = None
    for key, value in values.items():
        clean[_valid(key)] = cleaned = _valid(value)
        if found is None and not (_same(cleaned, value) and _valid(key) == key):
            found = f"column {json.dumps(key)} holds a lone surrogate, which is no character"
    return clean, found


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a) == json.dumps(b)


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_valid(one) for one in value]
    if isinstance(value, dict):
        return {_valid(key): _valid(one) for key, one in value.items()}
    return value
