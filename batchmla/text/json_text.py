"""JSON objects by their own text: what a model wrote is passed on as it is, not written anew."""

import json
from typing import Any, NoReturn


def members(text: str) -> dict[str, str]:
    """Name → text of the value, of a JSON object that is all of `text` but white space.

    Raises ValueError with a reason: no JSON, no object, a name that comes twice, or NaN.
    """
    found: dict[str, str] = {}
    at = _expect(text, _space(text, 0), "{")
    at = _space(text, at)
    while not text.startswith("}", at):
        if found:
            at = _space(text, _expect(text, at, ","))
        name, at = _decoded(text, at)
        if not isinstance(name, str):
            raise ValueError("a name in it is no string")
        if name in found:
            raise ValueError(f"it has {name!r} twice")
        start = _space(text, _expect(text, _space(text, at), ":"))
        _, at = _decoded(text, start)
        found[name] = text[start:at]
        at = _space(text, at)
    if _space(text, at + 1) != len(text):
        raise ValueError("text follows the JSON object")
    return found


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value, white space around it aside."""
    try:
        _, end = _decoded(text, _space(text, 0))
    except ValueError:
        return False
    return _space(text, end) == len(text)


def written(value: Any) -> str:
    """A value as the chat formats write JSON: no escapes beyond those that JSON needs."""
    return json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decoded(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as fault:
        raise ValueError(f"it is not JSON: {fault.msg.lower()} at character {fault.pos}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _expect(text: str, at: int, wanted: str) -> int:
    if not text.startswith(wanted, at):
        raise ValueError(f"it is not a JSON object: no {wanted!r} at character {at}")
    return at + 1


def _space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n\r":
        at += 1
    return at
