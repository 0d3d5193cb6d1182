"""DSML, the markup of tool calls in DeepSeek V3.2 and V4. It knows no prompts.

    <｜DSML｜BLOCK>
    <｜DSML｜invoke name="F">
    <｜DSML｜parameter name="p" string="true">text</｜DSML｜parameter>
    <｜DSML｜parameter name="q" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜BLOCK>

BLOCK differs between the two. Nothing in it is escaped.
"""

import re

from batchmla.text.formats.calls import BadCall, Schemas, ToolCall, ToolSyntax
from batchmla.text.json_text import is_json, written

MARK = "｜DSML｜"

_INVOKE = re.compile(
    rf'<{MARK}invoke name="(?P<name>[^"<>]+)">(?P<body>.*?)</{MARK}invoke>', re.DOTALL
)
_PARAMETER = re.compile(
    rf'<{MARK}parameter name="(?P<name>[^"]+)" string="(?P<is_text>true|false)">'
    rf"(?P<value>.*?)</{MARK}parameter>",
    re.DOTALL,
)


def dsml_syntax(block: str) -> ToolSyntax:
    """Calls in blocks of this name."""
    return ToolSyntax(
        begin=f"<{MARK}{block}>",
        end=f"</{MARK}{block}>",
        read=_read,
        lead="\n\n",
        traces=(MARK,),
    )


def _read(body: str, schemas: Schemas) -> list[ToolCall]:
    calls: list[ToolCall] = []
    at = 0
    while rest := body[at:].lstrip():
        at = len(body) - len(rest)
        invoke = _INVOKE.match(body, at)
        if invoke is None:
            raise BadCall(f"a call is not enclosed in <{MARK}invoke> and </{MARK}invoke>")
        calls.append(ToolCall(invoke["name"], _arguments(invoke["name"], invoke["body"])))
        at = invoke.end()
    if not calls:
        raise BadCall("there is no call in it")
    return calls


def _arguments(function: str, body: str) -> str:
    """The parameters as the text of a JSON object."""
    found: dict[str, str] = {}
    at = 0
    while rest := body[at:].lstrip():
        at = len(body) - len(rest)
        parameter = _PARAMETER.match(body, at)
        if parameter is None or MARK in parameter["value"]:
            raise BadCall(f"the arguments of {function} cannot be read: a parameter is broken")
        name, value = parameter["name"], parameter["value"]
        if name in found:
            raise BadCall(f"the arguments of {function} cannot be read: they have {name!r} twice")
        if parameter["is_text"] == "true":
            found[name] = written(value)
        elif is_json(value):
            found[name] = value.strip()
        else:
            raise BadCall(f"the arguments of {function} cannot be read: {name!r} is not JSON")
        at = parameter.end()
    return "{" + ", ".join(f"{written(name)}: {value}" for name, value in found.items()) + "}"
