"""A row's columns become the text of its prompt: templates over columns, and message columns.

All text that comes from a row is marked as such. What a row lacks or holds in a shape that cannot
be used is a `RowFault`, the row's own; a template that names no column of the input is a JobError.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from batchmla.errors import JobError
from batchmla.jobs.wording import nearest
from batchmla.text.control import ControlStrings
from batchmla.text.environment import NullValue, column_environment
from batchmla.text.marked import MarkedText
from batchmla.text.template import MarkedTemplate, TemplateFault

ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")
_MESSAGE_NAMES = (*_REASONING_NAMES, "name", "tool_calls", "tool_call_id")
_SURROGATE = re.compile("[\ud800-\udfff]")


class RowFault(Exception):
    """Why one row has no prompt, as a sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class ColumnTemplate:
    """A template of the job file, filled from a row. An input without columns has no rows."""

    def __init__(
        self, source: str, field: str, columns: Sequence[str], control: ControlStrings
    ) -> None:
        """`field` is its place in the job file, `columns` those of the input."""
        try:
            self._template = MarkedTemplate(source, column_environment(), control)
        except TemplateFault as fault:
            raise JobError(f"{field} is not a valid template: {fault}") from None
        self.field = field
        self.columns = tuple(sorted(self._template.names))
        for name in self.columns:
            if columns and name not in columns:
                raise JobError(f"{field} uses {{{{ {name} }}}}: {_no_column(name, columns)}")
        self._parts = self._template.outputs()

    def render(self, values: Mapping[str, Any]) -> MarkedText:
        """The text of one row."""
        if self._parts is not None:
            return MarkedText.join(
                part if isinstance(part, str) else _cell(part.name, values) for part in self._parts
            )
        used = {name: _wrapped(values.get(name), name) for name in self.columns}
        try:
            return self._template.render(used)
        except TemplateFault as fault:
            raise RowFault(f"{self.field}: {fault}") from None


class RawPrompt:
    """`prompt.raw`: a column's text, or a template, without a chat template around it."""

    def __init__(self, source: str, columns: Sequence[str], control: ControlStrings) -> None:
        is_template = "{{" in source or "{%" in source
        self._column = source if source in columns or not is_template else None
        self._template: ColumnTemplate | None = None
        self.columns: tuple[str, ...] = (source,)
        if self._column is not None:
            if columns and source not in columns:
                raise JobError(f"prompt.raw: {source!r}: {_no_column(source, columns)}")
        else:
            self._template = ColumnTemplate(source, "prompt.raw", columns, control)
            self.columns = self._template.columns

    def render(self, values: Mapping[str, Any]) -> MarkedText:
        """The text of one row; empty text is a fault, white space is not."""
        if self._template is not None:
            text = self._template.render(values)
        else:
            text = _cell(self._column or "", values)
        if not text.text:
            raise RowFault("the prompt is empty")
        return text


class UserPrompt:
    """`prompt.user` and `prompt.system`: a conversation of one turn."""

    def __init__(
        self, user: str, system: str | None, columns: Sequence[str], control: ControlStrings
    ) -> None:
        self._user = ColumnTemplate(user, "prompt.user", columns, control)
        self._system = None
        if system is not None:
            self._system = ColumnTemplate(system, "prompt.system", columns, control)
        used = self._user.columns + (self._system.columns if self._system is not None else ())
        self.columns = tuple(dict.fromkeys(used))

    def messages(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The conversation of one row."""
        user = {"role": "user", "content": self._user.render(values)}
        if self._system is None:
            return [user]
        return [{"role": "system", "content": self._system.render(values)}, user]


class MessagesPrompt:
    """`prompt.messages`: a column that holds [{role, content}, …]."""

    def __init__(self, column: str, columns: Sequence[str]) -> None:
        if columns and column not in columns:
            raise JobError(f"prompt.messages: {column!r}: {_no_column(column, columns)}")
        self._column = column
        self.columns = (column,)

    def messages(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The conversation of one row."""
        return messages_of(_present(self._column, values), f"column {self._column!r}", self._column)


def messages_of(value: Any, where: str, column: str | None = None) -> list[dict[str, Any]]:
    """A conversation as a row has it, `where` names its place. Raises RowFault.

    Text parts of a content are joined by line breaks. A conversation must leave the next turn to
    the assistant.
    """
    if not isinstance(value, list):
        raise RowFault(f"{where} holds {_no_messages(value, column)}")
    if not value:
        raise RowFault(f"{where}: the conversation is empty")
    messages = [_message(item, f"{where}, message {n}") for n, item in enumerate(value)]
    if messages[0]["role"] == "tool":
        raise RowFault(f"{where}: the conversation starts with a tool message")
    if messages[-1]["role"] == "assistant":
        raise RowFault(f"{where}: the conversation ends with an assistant message")
    return messages


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise RowFault(f"{where} is not a map of role and content but {_kind(item)}")
    role = item.get("role")
    if role is None:
        raise RowFault(f"{where} has no role; known are {', '.join(ROLES)}")
    if not isinstance(role, str) or role not in ROLES:
        raise RowFault(f"{where} has as its role {_kind(role)}; known are {', '.join(ROLES)}")
    message: dict[Any, Any] = {"role": role}
    content = item.get("content")
    if content is not None:
        message["content"] = _marked(_content(content, where), where)
    elif not (role == "assistant" and item.get("tool_calls")):
        raise RowFault(f"{where} has no content")
    for name, value in item.items():
        if name not in message and name != "content" and value is not None:
            key = name if name in _MESSAGE_NAMES else _marked(str(name), where)
            message[key] = _wrapped(value, f"{where}: {name}")
    reasoning = next((message[n] for n in _REASONING_NAMES if n in message), None)
    if reasoning is not None:  # templates read it under either name
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowFault(f"{where}: its content is no text but {_kind(content)}")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise RowFault(f"{where}: its content has a part that is not text")
        texts.append(text)
    return "\n".join(texts)


def _cell(column: str, values: Mapping[str, Any]) -> MarkedText:
    """A cell that is put into the prompt as it is."""
    value = _present(column, values)
    if isinstance(value, str):
        return _marked(value, f"column {column!r}")
    if isinstance(value, bytes):
        raise RowFault(f"column {column!r} holds bytes, which are not text; decode them before")
    if isinstance(value, list | tuple | dict):
        raise RowFault(
            f"column {column!r} holds {_kind(value)}, which is not text; write "
            f"{{{{ {column} | tojson }}}} in the prompt's template to have it as JSON"
        )
    return MarkedText.of_row(str(value))


def _present(column: str, values: Mapping[str, Any]) -> Any:
    value = values.get(column)
    if _is_null(value):
        raise RowFault(f"column {column!r} is {_null_word(column, values)}")
    return value


def _null_word(column: str, values: Mapping[str, Any]) -> str:
    if column not in values:
        return "missing"
    return "null" if values[column] is None else "NaN"


def _is_null(value: Any) -> bool:
    return value is None or (not isinstance(value, str) and _is_nan(value))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _marked(text: str, where: str) -> MarkedText:
    if not text.isascii() and _SURROGATE.search(text) is not None:
        raise RowFault(f"{where} holds half a character (a lone surrogate), which is not text")
    return MarkedText.of_row(text)


def _wrapped(value: Any, name: str) -> Any:
    """A value for a template: text marked at any depth, keys too, nulls made to fail as text."""
    if isinstance(value, str):
        return _marked(value, name)
    if isinstance(value, bytes):
        raise RowFault(f"column {name!r} holds bytes, which are not text")
    if isinstance(value, Mapping):
        return {
            _marked(str(key), name): _arguments(item, name)
            if key == "arguments"
            else _wrapped(item, name)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_wrapped(item, name) for item in value]
    return NullValue(name=name) if _is_null(value) else value


def _arguments(value: Any, name: str) -> Any:
    """Those of a tool call: JSON, in which null is a value like any other."""
    if isinstance(value, Mapping):
        return {_marked(str(key), name): _arguments(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_arguments(item, name) for item in value]
    return None if value is None else _wrapped(value, name)


def _kind(value: Any) -> str:
    """A value of a row in words, in short."""
    if isinstance(value, Mapping):
        return "a map"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f'the text "{value:.60}"'
    if isinstance(value, int | float):
        return f"the number {value!r:.60}"
    return "bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"


def _no_messages(value: Any, column: str | None) -> str:
    """What is in place of a conversation, and what to do with it."""
    said = f"{_kind(value)}, which is not a list of messages"
    if column is None:
        return said
    if isinstance(value, str) and value.lstrip().startswith("["):
        return f"{said}; if that is JSON, store it as a list of {{role, content}}"
    if isinstance(value, Mapping):
        return f'{said}; to prompt with it use prompt.user: "{{{{ {column} | tojson }}}}"'
    return f'{said}; to prompt with it use prompt.user: "{{{{ {column} }}}}"'


def _no_column(name: str, columns: Sequence[str]) -> str:
    near = nearest(name, columns)
    hint = f"; did you mean {near}?" if near else ""
    return f"the input has no column {name!r}{hint} (its columns: {', '.join(columns)})"
