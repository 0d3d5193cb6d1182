"""DeepSeek-V3.1, the hybrid: the prompt ends with `<think>` or, thinking off, with `</think>`.

A call is the name, a separator and the arguments as JSON.
"""

from batchmla.text.formats.calls import BadCall, Schemas, ToolCall, ToolSyntax, call_of, enclosed
from batchmla.text.formats.deepseek_r1 import (
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    SEPARATOR,
)
from batchmla.text.formats.format import Format


def _read(body: str, schemas: Schemas) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for inside in enclosed(body, CALL_BEGIN, CALL_END):
        name, separator, arguments = inside.partition(SEPARATOR)
        if not separator:
            raise BadCall(f"a call has no {SEPARATOR} behind its name")
        calls.append(call_of(name, arguments))
    return calls


FORMAT = Format(
    name="deepseek_v3",
    start="<think>",
    end="</think>",
    tools=ToolSyntax(
        begin=SECTION_BEGIN,
        end=SECTION_END,
        read=_read,
        traces=(CALL_BEGIN, CALL_END, SEPARATOR, SECTION_END),
    ),
    arguments="text",
)
