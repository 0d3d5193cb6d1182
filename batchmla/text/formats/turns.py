"""What the prompt encoders of DeepSeek V3.2 and V4 share: messages, tool calls and definitions.

Messages are those of the jobs: text that came from a row is a `MarkedText`, names included.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from batchmla.text.formats.dsml import MARK
from batchmla.text.formats.wording import Wording
from batchmla.text.json_text import written
from batchmla.text.marked import MarkedText
from batchmla.text.template import TemplateFault

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"

Part = MarkedText | str
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


def content_of(message: Message) -> MarkedText:
    """A message's text, empty where it has none."""
    content = message.get("content")
    return content if isinstance(content, MarkedText) else MarkedText("")


def split_reasoning(message: Message) -> Message:
    """An earlier answer whose text still holds its reasoning, with the two apart."""
    content = content_of(message)
    if message["role"] != "assistant" or message.get("reasoning_content") is not None:
        return message
    end = content.text.find(END_THINK)
    if end < 0:
        return message
    start = len(THINK) if content.text.startswith(THINK) else 0
    rest = content.cut(end + len(END_THINK), len(content.text))
    return {**message, "reasoning_content": content.cut(start, end), "content": rest}


def reasoning_of(message: Message) -> MarkedText | None:
    """The reasoning of an earlier answer."""
    reasoning = message.get("reasoning_content")
    if reasoning is None or isinstance(reasoning, MarkedText):
        return reasoning
    raise TemplateFault("the reasoning of a message is no text")


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The tool calls of an earlier answer: id, name, arguments by name. Raises TemplateFault."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    if not isinstance(calls, list):
        raise TemplateFault("the tool_calls of a message are no list")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    outer = _by_name(call)
    inner = _by_name(outer.get("function", call))
    name, arguments = inner.get("name"), inner.get("arguments")
    if not isinstance(name, MarkedText | str):
        raise TemplateFault("a tool call has no name")
    if isinstance(arguments, MarkedText | str):
        try:
            arguments = row_texts(json.loads(plain(arguments)))
        except (ValueError, RecursionError):
            raise TemplateFault(
                f"the arguments of the tool call {plain(name)} are no JSON object"
            ) from None
    if not isinstance(arguments, Mapping):
        raise TemplateFault(f"the arguments of the tool call {plain(name)} are no JSON object")
    return {"id": plain(outer.get("id")), "name": name, "arguments": arguments}


def _by_name(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TemplateFault("a tool call is no map")
    return {plain(name): item for name, item in value.items()}


def row_texts(value: Any) -> Any:
    """Decoded JSON of a row with its texts marked, names included."""
    if isinstance(value, str):
        return MarkedText.of_row(value)
    if isinstance(value, dict):
        return {MarkedText.of_row(name): row_texts(item) for name, item in value.items()}
    return [row_texts(item) for item in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """A value without marks, as JSON has it."""
    if isinstance(value, MarkedText):
        return value.text
    if isinstance(value, Mapping):
        return {plain(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, jinja2.Undefined) else value


def has_marks(value: Any) -> bool:
    """Whether any of it came from a row."""
    if isinstance(value, Mapping):
        return any(has_marks(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return any(has_marks(item) for item in value)
    return isinstance(value, MarkedText)


def calls_block(block: str, calls: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Calls in DSML."""
    parts: list[Part] = [f"<{MARK}{block}>\n"]
    for call in calls:
        parts += [f'<{MARK}invoke name="', call["name"], '">\n']
        for place, (name, value) in enumerate(call["arguments"].items()):
            is_text = isinstance(value, MarkedText | str)
            shown = value if is_text else MarkedText.of_row(written(plain(value)))
            parts.append("\n" if place else "")
            parts += [f'<{MARK}parameter name="', name, f'" string="{str(is_text).lower()}">']
            parts += [shown, f"</{MARK}parameter>"]
        parts.append(f"\n</{MARK}invoke>\n")
    return [*parts, f"</{MARK}{block}>"]


def tools_section(wording: Wording | None, name: str, tools: Tools, file: str) -> MarkedText:
    """The text `name` of the model's encoder around the definitions of `tools`."""
    if wording is None:
        raise TemplateFault(
            f"the text around tool definitions stands in encoding/{file} of the model, which its "
            "folder lacks; copy that file there"
        )
    schemas: list[Part] = []
    for place, tool in enumerate(tools):
        function = {plain(key): value for key, value in tool.items()}.get("function")
        text = written(plain(function))
        schemas += ["\n" if place else "", MarkedText.of_row(text) if has_marks(function) else text]
    fields: dict[str, Part] = {
        "tool_schemas": MarkedText.join(schemas),
        "dsml_token": MARK,
        "thinking_start_token": THINK,
        "thinking_end_token": END_THINK,
    }
    return wording.filled(name, fields)


def last_turn(messages: Sequence[Message]) -> int:
    """Where the last message of the user or the developer stands, -1 without one."""
    places = (n for n, m in enumerate(messages) if m["role"] in ("user", "developer"))
    return max(places, default=-1)


def refuse_open_end(messages: Sequence[Message]) -> None:
    """A conversation that leaves the model no turn is a fault."""
    if not messages or messages[-1]["role"] not in ("user", "developer", "tool"):
        raise TemplateFault("it must end with a message of the user, the developer or a tool")
