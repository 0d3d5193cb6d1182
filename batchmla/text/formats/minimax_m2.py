"""MiniMax-M2: the prompt opens `<think>`; calls are tags without types.

A parameter's value is text where the tool's schema allows text, else JSON. Where the schema says
nothing, it is JSON if it can be read as such, else text.
"""

import re
from collections.abc import Mapping
from typing import Any

from batchmla.text.formats.calls import BadCall, Schemas, ToolCall, ToolSyntax
from batchmla.text.formats.format import Format
from batchmla.text.json_text import is_json, written

_BEGIN = "<minimax:tool_call>"
_END = "</minimax:tool_call>"
_TAGS = ("</invoke>", '<parameter name="', _BEGIN, _END)

_INVOKE = re.compile(r'<invoke name="(?P<name>[^"<>]+)">(?P<body>.*?)</invoke>', re.DOTALL)
_PARAMETER = re.compile(r'<parameter name="(?P<name>[^"]+)">(?P<value>.*?)</parameter>', re.DOTALL)


def _read(body: str, schemas: Schemas) -> list[ToolCall]:
    calls: list[ToolCall] = []
    at = 0
    while rest := body[at:].lstrip():
        at = len(body) - len(rest)
        invoke = _INVOKE.match(body, at)
        if invoke is None:
            raise BadCall("a call is not enclosed in <invoke> and </invoke>")
        name = invoke["name"]
        calls.append(ToolCall(name, _arguments(name, invoke["body"], schemas(name))))
        at = invoke.end()
    if not calls:
        raise BadCall("there is no call in it")
    return calls


def _arguments(function: str, body: str, schemas: Mapping[str, Any]) -> str:
    found: dict[str, str] = {}
    at = 0
    while rest := body[at:].lstrip():
        at = len(body) - len(rest)
        parameter = _PARAMETER.match(body, at)
        if parameter is None or any(tag in parameter["value"] for tag in _TAGS):
            raise BadCall(f"the arguments of {function} cannot be read: a parameter is broken")
        name, value = parameter["name"], parameter["value"]
        if name in found:
            raise BadCall(f"the arguments of {function} cannot be read: they have {name!r} twice")
        kinds = _kinds(schemas.get(name))
        if "string" in kinds or not (kinds or is_json(value)):
            found[name] = written(value)
        elif is_json(value):
            found[name] = value.strip()
        else:
            wanted = " or ".join(sorted(kinds))
            raise BadCall(
                f"the arguments of {function} cannot be read: {name!r} is no {wanted} in JSON"
            )
        at = parameter.end()
    return "{" + ", ".join(f"{written(name)}: {value}" for name, value in found.items()) + "}"


def _kinds(schema: Any) -> frozenset[str]:
    """The JSON types that a parameter's schema names, alternatives included."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for name in ("anyOf", "oneOf"):
        alternatives = schema.get(name)
        if isinstance(alternatives, list):
            kinds = kinds.union(*map(_kinds, alternatives))
    return frozenset(one for one in kinds if isinstance(one, str))


FORMAT = Format(
    name="minimax_m2",
    start="<think>",
    end="</think>",
    tools=ToolSyntax(begin=_BEGIN, end=_END, read=_read, lead="\n", traces=(_END,)),
    arguments="object",
)
