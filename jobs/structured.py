"""What sampling.structured holds: exactly one of a JSON schema, a regex, choices, a grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("json_schema", "regex", "choice", "grammar")


def read_structured(value: Any) -> dict[str, Any]:
    """{kind: what it must be} of a map with one key, or of its JSON text.

    Kinds with null count as not given. Raises ValueError with what it must be.
    """
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, Mapping):
        given = {kind: one for kind, one in value.items() if one is not None}
        if len(given) == 1 and set(given) <= set(KINDS):
            ((kind, inner),) = given.items()
            return {kind: read_kind(kind, inner)}
    raise ValueError(f"it must be a map with one of the keys {', '.join(KINDS)}")


def read_kind(kind: str, value: Any) -> Any:
    """The value of one kind in its plain form. Raises ValueError with what it must be."""
    if kind == "json_schema":
        schema = _parsed(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping | bool):
            raise ValueError("it must be a JSON schema: a map, or the JSON text of one")
        try:
            json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError) as fault:
            raise ValueError(
                f"it must be a JSON schema, and holds something else: {fault}"
            ) from None
        return schema
    if kind == "choice":
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not value or not all(isinstance(one, str) and one for one in value):
            raise ValueError("it must be a list of texts that are not empty")
        return list(value)
    if not isinstance(value, str) or not value:
        raise ValueError("it must be a text that is not empty")
    return value


_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
REQUEST_FIELDS = ("response_format", "structured_outputs", *_GUIDED)


def of_request(body: Mapping[str, Any]) -> tuple[str, Any] | None:
    """What the body of an OpenAI or vLLM request asks for: where it stands, and as a map that
    `read_structured` takes. Raises ValueError for what is not known.
    """
    found: list[tuple[str, Any]] = []
    for field, kind in _GUIDED.items():
        if body.get(field) is not None:
            found.append((f"body.{field}", {kind: body[field]}))
    given = body.get("structured_outputs")
    if given:
        found.append(("body.structured_outputs", _renamed(given)))
    given = body.get("response_format")
    if given is not None and given != {"type": "text"}:
        found.append(("body.response_format", _of_format(given)))
    if len(found) > 1:
        raise ValueError(f"{found[0][0]} and {found[1][0]} are two ways to say one thing; give one")
    return found[0] if found else None


def _renamed(given: Any) -> Any:
    """vLLM calls a JSON schema json."""
    if not isinstance(given, Mapping):
        return given
    return {"json_schema" if key == "json" else key: value for key, value in given.items()}


def _of_format(given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    inner = given.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inner, Mapping) or inner.get("schema") is None:
        raise ValueError(
            "body.response_format must be {type: text}, {type: json_object} or "
            "{type: json_schema, json_schema: {schema: …}}"
        )
    return {"json_schema": inner["schema"]}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as fault:
        raise ValueError(f"it must be JSON text: {fault}") from None


def without_nulls(value: Any) -> Any:
    """A column's value. Its structs have every key of every row, null where the row has none; a
    schema in which null means something has to be given as JSON text.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
