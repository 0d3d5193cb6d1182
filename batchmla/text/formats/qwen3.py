"""Qwen3: the model opens `<think>` itself; thinking off is an empty think block in the prompt.

A call is a JSON object with name and arguments between two tags.
"""

import json

from batchmla.text.formats.calls import BadCall, Schemas, ToolCall, ToolSyntax, call_of
from batchmla.text.formats.format import Format
from batchmla.text.json_text import members

_BEGIN = "<tool_call>"
_END = "</tool_call>"


def _read(body: str, schemas: Schemas) -> list[ToolCall]:
    try:
        parts = members(body)
    except ValueError as fault:
        raise BadCall(f"a call cannot be read: {fault}") from None
    name = json.loads(parts.get("name", "null"))
    if not isinstance(name, str) or "arguments" not in parts:
        raise BadCall("a call has no name or no arguments")
    return [call_of(name, parts["arguments"])]


FORMAT = Format(
    name="qwen3",
    start="<think>",
    end="</think>",
    tools=ToolSyntax(begin=_BEGIN, end=_END, read=_read, lead="\n", traces=(_END,)),
)
