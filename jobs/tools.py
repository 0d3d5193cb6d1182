"""`prompt.tools`: the tools that a model may call, of the whole job or of each row.

Definitions are those of OpenAI: [{type: function, function: {name, description, parameters}}].
Those of a file are the job's own text, those of a column are text of the row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmla.errors import JobError
from batchmla.jobs.conversation import RowFault
from batchmla.jobs.wording import nearest
from batchmla.text.chat import Tools
from batchmla.text.formats.format import ArgumentsForm
from batchmla.text.formats.turns import plain, row_texts
from batchmla.text.json_text import written


@dataclass(frozen=True, slots=True)
class GivenTools:
    """Definitions as a renderer takes them, and their JSON as `Prompt` carries it."""

    definitions: Tools = ()
    text: str | None = None

    @classmethod
    def of(cls, definitions: Sequence[Mapping[str, Any]]) -> "GivenTools":
        """Checked definitions; none at all are no tools."""
        return cls(definitions, written(plain(definitions))) if definitions else cls()


class JobTools:
    """What `prompt.tools` says."""

    def __init__(self, setting: str | None, columns: Sequence[str]) -> None:
        """`columns` are the input's, none where they are not known. Raises JobError."""
        self.common = GivenTools()
        self.column: str | None = None
        if setting is None:
            return
        if setting in columns or (not columns and not Path(setting).is_file()):
            self.column = setting
        elif Path(setting).is_file():
            self.common = GivenTools.of(_from_file(Path(setting)))
        else:
            near = nearest(setting, columns)
            hint = f"; did you mean {near}?" if near else ""
            raise JobError(
                f"prompt.tools: {setting} is neither a file nor a column of the input{hint} "
                f"(its columns: {', '.join(columns)})"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The column that holds the tools, if one does."""
        return () if self.column is None else (self.column,)

    def of_row(self, values: Mapping[str, Any]) -> GivenTools:
        """The tools of one row. Raises RowFault."""
        if self.column is None:
            return self.common
        return row_tools(values.get(self.column), f"column {self.column!r}")


def row_tools(value: Any, where: str) -> GivenTools:
    """The tools that a row brings along, as a list or as JSON; null is none. Raises RowFault."""
    if value is None or (isinstance(value, float) and value != value):
        return GivenTools()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as fault:
            raise RowFault(f"{where} holds no tool definitions: it is not JSON ({fault})") from None
    else:
        value = _without_nulls(value)
    try:
        checked = _checked(value, where)
        written(checked).encode()
    except JobError as fault:
        raise RowFault(str(fault)) from None
    except UnicodeEncodeError:
        raise RowFault(f"{where} holds half a character (a lone surrogate)") from None
    return GivenTools(row_texts(checked), written(checked)) if checked else GivenTools()


def _from_file(file: Path) -> list[dict[str, Any]]:
    where = f"prompt.tools: {file}"
    try:
        value = json.loads(file.read_bytes())
    except OSError as fault:
        raise JobError(f"{where} cannot be read: {fault.strerror}") from None
    except (ValueError, RecursionError) as fault:
        raise JobError(f"{where} is not JSON: {fault}") from None
    found = _checked(value, where)
    if not found:
        raise JobError(f"{where} holds no tools; leave prompt.tools out")
    return found


def _checked(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise JobError(f"{where}: tools are a list of {{type: function, function: {{name, …}}}}")
    for place, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise JobError(
                f"{where}: tool {place} has no function.name; tools are a list of "
                "{type: function, function: {name, description, parameters}}"
            )
    return value


def _without_nulls(value: Any) -> Any:
    """A cell of structs without the members that only other rows have."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(one) for one in value]
    return value


def arguments_as(messages: Sequence[dict[str, Any]], form: ArgumentsForm) -> list[dict[str, Any]]:
    """Messages with the arguments of earlier calls in the form that a template takes.

    Templates that take them as text also ask whether the content beside calls is none. Raises
    RowFault where arguments are no JSON object.
    """
    if form == "as_given" or not any("tool_calls" in message for message in messages):
        return list(messages)
    empty: dict[str, Any] = {"content": None} if form == "text" else {}
    return [
        {**empty, **message, "tool_calls": [_call_as(call, form) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _call_as(call: Any, form: ArgumentsForm) -> Any:
    if not isinstance(call, Mapping):
        return call
    made: dict[Any, Any] = {}
    for name, value in call.items():
        if plain(name) == "function":
            made[name] = _call_as(value, form)
        elif plain(name) == "arguments":
            made[name] = _arguments_as(value, form)
        else:
            made[name] = value
    return made


def _arguments_as(value: Any, form: ArgumentsForm) -> Any:
    bare = plain(value)
    if form == "text":
        return value if isinstance(bare, str) else row_texts(written(bare))
    if not isinstance(bare, str):
        return value
    try:
        found = json.loads(bare)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RowFault("a message's tool call has arguments that are no JSON object")
    return row_texts(found)
