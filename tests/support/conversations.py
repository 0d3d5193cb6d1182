"""Random conversations as rows have them: several turns, reasoning, tool calls and results."""

import json
import random
from typing import Any

PIECES = (
    *"abcxyz 0123456789 .,:;!?'\"()[]{}\n\t",
    "  ",
    "\n\n",
    " the",
    "think",
    "user",
    "é",
    "e\u0301",
    "東京",
    "🙂",
    "\ufffd",
    "\u2028",
    "<b>",
    "&amp;",
    "{{ x }}",
    "%}",
)
NAMES = ("look_up", "add", "f")


def text(random_: random.Random, least: int = 1) -> str:
    """A text of a few pieces, none of which is or makes a control string."""
    made = "".join(random_.choices(PIECES, k=random_.randint(least, 20)))
    return made if made.strip() or not least else made + "a"


def value(random_: random.Random, depth: int = 0) -> Any:
    """A value of JSON."""
    kind = random_.randrange(7 if depth < 2 else 5)
    if kind == 5:
        return [value(random_, depth + 1) for _ in range(random_.randrange(3))]
    if kind == 6:
        return {text(random_): value(random_, depth + 1) for _ in range(random_.randrange(3))}
    return (text(random_, 0), random_.randint(-99, 99), random_.random(), True, None)[kind]


def tools(random_: random.Random) -> list[dict[str, Any]]:
    """One to three definitions."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": text(random_),
                "parameters": {
                    "type": "object",
                    "properties": {"p": {"type": "string", "description": text(random_)}},
                    "required": ["p"],
                },
            },
        }
        for name in random_.sample(NAMES, random_.randint(1, len(NAMES)))
    ]


def conversation(
    random_: random.Random, *, has_calls: bool, arguments: str, has_null: bool = True
) -> list[dict[str, Any]]:
    """Messages up to a turn of the user, or the results of tools.

    `arguments`: "text" for calls with JSON as a text, "object" for one with an object. `has_null`:
    whether the content beside calls may be null.
    """
    made: list[dict[str, Any]] = []
    if random_.random() < 0.5:
        made.append({"role": "system", "content": text(random_)})
    for turn in range(random_.randint(1, 4)):
        if turn:
            made.append(_answer(random_))
        made.append({"role": "user", "content": text(random_)})
        for step in range(random_.randrange(3) if has_calls else 0):
            made += _calls(random_, f"{turn}{step}", arguments, has_null)
    return made


def _answer(random_: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": text(random_)}
    if random_.random() < 0.6:
        made["reasoning_content"] = text(random_)
    return made


def _calls(
    random_: random.Random, key: str, arguments: str, has_null: bool
) -> list[dict[str, Any]]:
    """An answer that calls tools, and their results."""
    calls = []
    for place in range(random_.randint(1, 3)):
        name = random_.choice(NAMES)
        given: Any = {text(random_): value(random_) for _ in range(random_.randrange(3))}
        if arguments == "text":
            given = json.dumps(given, ensure_ascii=random_.random() < 0.5)
        call_id = f"functions.{name}:{key}{place}"
        calls.append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
        )
    content = None if has_null and random_.random() < 0.5 else text(random_)
    asked: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
    if random_.random() < 0.5:
        asked["reasoning_content"] = text(random_)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text(random_)} for call in calls
    ]
    return [asked, *results]
