"""Kimi-K2: K2-Thinking opens `<think>` itself, K2-Instruct does not think.

A call is an id of the form functions.NAME:INDEX and its arguments as JSON.
"""

import re

from batchmla.text.formats.calls import BadCall, Schemas, ToolCall, ToolSyntax, call_of, enclosed
from batchmla.text.formats.format import Format

_CALL_BEGIN = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_BEGIN = "<|tool_calls_section_begin|>"
_END = "<|tool_calls_section_end|>"

_ID = re.compile(r"\s*functions\.(?P<name>.+):[0-9]+\s*")


def _read(body: str, schemas: Schemas) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for inside in enclosed(body, _CALL_BEGIN, _CALL_END):
        head, separator, arguments = inside.partition(_ARGUMENTS)
        call_id = _ID.fullmatch(head)
        if not separator or call_id is None:
            raise BadCall(f"a call has no id functions.NAME:INDEX before {_ARGUMENTS}")
        calls.append(call_of(call_id["name"], arguments))
    return calls


FORMAT = Format(
    name="kimi_k2",
    start="<think>",
    end="</think>",
    tools=ToolSyntax(
        begin=_BEGIN,
        end=_END,
        read=_read,
        traces=(_CALL_BEGIN, _CALL_END, _ARGUMENTS, _END),
    ),
)
