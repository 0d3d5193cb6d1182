"""OpenAI batch files: JSONL whose lines are requests with an id, an address and a body.

A line that is no such request is malformed. What its body asks for is the prompt's matter.
"""

from collections.abc import Mapping
from typing import Any

from batchmla.jobs.input_file import InputFile
from batchmla.jobs.jsonl import JsonlForm
from batchmla.jobs.jsonl_types import JSON, Kind, KindName
from batchmla.jobs.text_form import MalformedRecord, Record, RecordBlock

_TEXT = Kind(KindName.TEXT)
COLUMNS: Mapping[str, Kind] = {"custom_id": _TEXT, "method": _TEXT, "url": _TEXT, "body": JSON}


class BatchForm(JsonlForm):
    """Rows with the columns `custom_id`, `method`, `url` and `body`, the last carried as JSON."""

    name = "OpenAI batch"

    def parse(self, record: Record) -> tuple[dict[str, Any], str | None]:
        """The parts of a request."""
        values, error = super().parse(record)
        return _request(values), error

    def parse_all(self, block: RecordBlock) -> list[dict[str, Any]] | None:
        """The same of many."""
        found = super().parse_all(block)
        try:
            return None if found is None else list(map(_request, found))
        except MalformedRecord:
            return None

    def default_id(self, files: tuple[InputFile, ...]) -> str | None:
        """Always the request's own."""
        return "custom_id"

    def first_kinds(self, files: tuple[InputFile, ...]) -> dict[str, Kind]:
        """The columns do not depend on the rows."""
        return dict(COLUMNS)

    def settle(self, kinds: Mapping[str, Kind]) -> dict[str, Kind]:
        """As they are."""
        return dict(kinds)


def _request(values: dict[str, Any]) -> dict[str, Any]:
    """The object of a line under the columns of a batch."""
    for name in ("custom_id", "url", "body"):
        if values.get(name) is None:
            raise MalformedRecord(f"a request of a batch has a {name}, which is missing here")
    for name, value in values.items():
        if name not in COLUMNS:
            raise MalformedRecord(f"the key {name} is not known in a request of a batch")
        if name == "body" and not isinstance(value, dict):
            raise MalformedRecord("the body is not an object")
        if name != "body" and not isinstance(value, str | None):
            raise MalformedRecord(f"the value of {name} is not text")
    return {name: values.get(name) for name in COLUMNS}


def is_batch(file: InputFile) -> bool:
    """Whether the first line of a JSONL file is a request of a batch."""
    form = BatchForm()
    first = next(form.blocks(file), None)
    if first is None:
        return False
    try:
        form.parse(next(first.records()))
    except MalformedRecord:
        return False
    return True
