"""JSONL: one object a line; and what is wrong with a line.

Only LF ends a line (a CR before it is dropped). A byte order mark at the start of a file and blank
lines are skipped. A line that is no object, holds a key twice or is not UTF-8 is malformed.

Lines are parsed many at a time where that tells all that `parse_line` would, and by it where not.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from batchmla.jobs.input_file import InputFile
from batchmla.jobs.jsonl_columns import fits_all, to_arrow_values, widen_all
from batchmla.jobs.jsonl_types import Kind, is_mixed, settle
from batchmla.jobs.lines import CutShort, read_line_blocks
from batchmla.jobs.text_form import BLOCK_ROWS, MalformedRecord, Record, RecordBlock

logger = logging.getLogger(__name__)

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_RAW_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SPACES = ('" ', "\t", "\r")  # those that may stand between a key and its colon
_MAX_DEPTH = 32  # of objects whose keys are counted


class JsonlForm:
    """One object a line; its keys are the columns."""

    name = "JSONL"

    def blocks(self, file: InputFile) -> Iterator[RecordBlock]:
        """The lines that are not blank."""
        row = 0
        try:
            for first, found in read_line_blocks(file):
                lines: Sequence[int] = range(first, first + len(found))
                blank = {n for n, raw in zip(lines, found, strict=True) if not raw.strip()}
                if blank:
                    lines = [number for number in lines if number not in blank]
                    found = [found[number - first] for number in lines]
                sizes = list(map(len, found))
                for at in range(0, len(found), BLOCK_ROWS):
                    cut = slice(at, at + BLOCK_ROWS)
                    yield RecordBlock(row + at, lines[cut], sizes[cut], found[cut])
                row += len(found)
        except CutShort as fault:
            raise fault.as_error(file, row) from None

    def parse(self, record: Record) -> tuple[dict[str, Any], str | None]:
        """The object, with U+FFFD for lone surrogates and a sentence about them."""
        return replace_surrogates(record.data, parse_line(record.data))

    def parse_all(self, block: RecordBlock) -> list[dict[str, Any]] | None:
        """The same of many lines in one go, without a look at each that needs none."""
        try:
            texts = b"\n".join(block.data).decode("utf-8").split("\n")
            found = list(map(_SCAN, texts, repeat(0)))  # shorter where a line holds no value
        except (ValueError, RecursionError):
            return None
        if [end for _, end in found] != list(map(len, texts)):
            return None
        objects = [value for value, _ in found]
        if set(map(type, objects)) - {dict}:
            return None
        for place in _doubtful(texts, objects):
            record = Record(block.row + place, block.lines[place], 0, block.data[place])
            try:
                objects[place], error = self.parse(record)
            except MalformedRecord:
                return None
            if error is not None:
                return None
        return objects

    def default_id(self, files: tuple[InputFile, ...]) -> str | None:
        """`id` if the first readable row of the input has it."""
        for file in files:
            for block in self.blocks(file):
                for raw in block.data:
                    try:
                        return "id" if "id" in parse_line(raw) else None
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

    def widen(self, kind: Kind, values: Sequence[Any]) -> Kind:
        """See `jsonl_types`."""
        return widen_all(kind, values)

    def settle(self, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
        """Types of columns; says which become JSON text."""
        mixed = sorted(name for name, kind in kinds.items() if is_mixed(kind))
        if mixed:
            logger.warning(
                "input columns with values of different types are carried as JSON text: %s",
                ", ".join(mixed),
            )
        return {name: settle(kind) for name, kind in kinds.items()}

    def fits(self, kind: Kind, values: Sequence[Any]) -> bool:
        """See `jsonl_types`."""
        return fits_all(kind, values)

    def row_values(self, kind: Kind | None, values: Sequence[Any]) -> Sequence[Any]:
        """As in the file."""
        return values

    def arrow_values(self, kind: Kind, values: Sequence[Any]) -> Sequence[Any]:
        """See `jsonl_types`."""
        return to_arrow_values(kind, values)


def _doubtful(texts: Sequence[str], objects: Sequence[dict[str, Any]]) -> list[int]:
    """The places of lines that may hold a key twice or a lone surrogate."""
    whole = "\n".join(texts)
    types = set(map(type, chain.from_iterable(map(dict.values, objects))))
    is_flat = not types & {dict, list}
    num_keys = list(map(len, objects)) if is_flat else list(map(_num_keys, objects))
    if not _is_doubtful(whole, sum(num_keys)):
        return []
    each = enumerate(zip(texts, num_keys, strict=True))
    return [place for place, (text, count) in each if _is_doubtful(text, count)]


def _is_doubtful(text: str, num_keys: int) -> bool:
    """Whether JSON text may have more keys than were kept of it, or a lone surrogate.

    Where no quote is before a space and there are no tabs, each key ends with `":`, as quotes
    inside of text may do.
    """
    if text.count('":') != num_keys or any(mark in text for mark in _SPACES):
        return True
    return "\\u" in text and _SURROGATE_ESCAPE.search(text) is not None


def _num_keys(value: Any, depth: int = 0) -> int:
    """The keys of an object and of those in it; a wrong number for one that is deep."""
    if depth > _MAX_DEPTH:
        return -sys.maxsize
    inner = [each for each in (value.values() if type(value) is dict else value) if _is_nest(each)]
    own = len(value) if type(value) is dict else 0
    return own + sum(_num_keys(each, depth + 1) for each in inner)


def _is_nest(value: Any) -> bool:
    return type(value) is dict or type(value) is list


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
# the same but for keys given twice, from a place in a text on
_SCAN: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def replace_surrogates(raw: bytes, values: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """`values` with U+FFFD for every lone surrogate, and a sentence if there was one."""
    if b"\\u" not in raw or not _RAW_SURROGATE_ESCAPE.search(raw):
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
