"""DeepSeek-R1 and its distillations: the prompt opens `<think>`, or the model does.

A call is the word function, a separator, the name, and the arguments in a fenced block of JSON.
"""

import re

from batchmla.text.formats.calls import BadCall, Schemas, ToolCall, ToolSyntax, call_of, enclosed
from batchmla.text.formats.format import Format

CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
SECTION_BEGIN = "<｜tool▁calls▁begin｜>"
SECTION_END = "<｜tool▁calls▁end｜>"

_CALL = re.compile(
    rf"function{SEPARATOR}(?P<name>[^\n]+)\n```json\n(?P<arguments>.*)\n```", re.DOTALL
)


def _read(body: str, schemas: Schemas) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for inside in enclosed(body, CALL_BEGIN, CALL_END):
        call = _CALL.fullmatch(inside.strip())
        if call is None:
            raise BadCall("a call is not a name and a block of JSON")
        calls.append(call_of(call["name"], call["arguments"]))
    return calls


FORMAT = Format(
    name="deepseek_r1",
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
