"""Faults of a job file as sentences: unknown keys with the nearest, values with what is allowed.

It knows the shape of `JobSpec` from its fields only.
"""

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from batchmla.jobs.yaml_text import KeyPath, key_word

# what users of other tools write, and the key it is here
_OTHER_NAMES = {
    "reasoning_content": "reasoning",
    "thinking_budget": "reasoning.budget",
    "thinking_token_budget": "reasoning.budget",
    "max_thinking_tokens": "reasoning.budget",
    "reasoning_parser": "reasoning.parser",
    "enable_thinking": "reasoning.thinking",
    "max_new_tokens": "sampling.max_tokens",
    "tensor_parallel": "model.parallel.tensor",
    "tensor_parallel_size": "model.parallel.tensor",
    "expert_parallel_size": "model.parallel.expert",
    "data_parallel_size": "model.parallel.attention_data",
    "gpu_memory_utilization": "model.memory_utilization",
    "enable_prefix_caching": "engine.prefix_caching",
    "max_num_batched_tokens": "engine.max_batched_tokens",
    "batch_size": "engine.max_num_seqs",
    "concurrency": "engine.max_num_seqs",
    "custom_id": "input.id",
    "num_replicas": "executor.replicas",
}


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, or None when none is near."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def known_keys(model: type[BaseModel], above: KeyPath = ()) -> dict[KeyPath, Any]:
    """Every key path of `model` with its type, sections included."""
    keys: dict[KeyPath, Any] = {}
    for name, info in model.model_fields.items():
        annotation: Any = info.annotation
        if info.metadata:
            annotation = Annotated[annotation, *info.metadata]
        keys[(*above, name)] = annotation
        section = _section_of(annotation)
        if section is not None:
            keys |= known_keys(section, (*above, name))
    return keys


def unknown_keys(raw: Mapping[Any, Any], known: Mapping[KeyPath, Any]) -> dict[KeyPath, str]:
    """A sentence for every key of `raw` that is not in `known`."""
    return dict(_unknown_below(raw, (), known))


def _unknown_below(
    raw: Mapping[Any, Any], above: KeyPath, known: Mapping[KeyPath, Any]
) -> Iterator[tuple[KeyPath, str]]:
    for key, value in raw.items():
        path = (*above, key_word(key))
        if path in known and isinstance(key, str):
            has_keys = any(p[: len(path)] == path != p for p in known)
            if isinstance(value, Mapping) and has_keys and not _takes_any_key(known[path]):
                yield from _unknown_below(value, path, known)
            continue
        yield path, f"unknown key {'.'.join(path)}{_hint(path, known)}"
        is_foreign_section = isinstance(value, Mapping) and path not in known
        for leaf in value if is_foreign_section else ():
            inner = (*path, key_word(leaf))
            yield inner, f"unknown key {'.'.join(inner)}{_hint(inner, known)}"


def _hint(path: KeyPath, known: Mapping[KeyPath, Any]) -> str:
    *above, word = path
    if word == "reasoning_content":
        return "; the reasoning field is called reasoning"
    if word in _OTHER_NAMES:
        return f"; here it is {_OTHER_NAMES[word]}"
    siblings = {p[-1]: ".".join(p) for p in known if p[:-1] == tuple(above)}
    others: dict[str, str] = {}
    for p in known:
        others.setdefault(p[-1], ".".join(p))
    found = (
        siblings.get(nearest(word, siblings) or "")
        or others.get(word)
        or others.get(nearest(word, others, cutoff=0.75) or "")
    )
    if found is not None:
        return f"; did you mean {found}?"
    return f"; known here: {', '.join(siblings)}" if siblings else ""


def value_faults(
    fault: ValidationError, known: Mapping[KeyPath, Any]
) -> Iterator[tuple[KeyPath, str]]:
    """One sentence per key that pydantic refused, however many branches of a union failed."""
    seen: set[KeyPath] = set()
    for error in fault.errors(include_url=False, include_context=False):
        path = _known_path(error["loc"], known)
        if path in seen:
            continue
        seen.add(path)
        shown = ".".join(path)
        section = _section_of(known.get(path))
        if error["type"] == "missing" and section is not None:
            needed = [k for k, info in section.model_fields.items() if info.is_required()]
            needed = [f"{shown}.{key}" for key in needed] or [
                f"one of {', '.join(f'{shown}.{key}' for key in section.model_fields)}"
            ]
            yield path, f"the section {shown} is missing; give at least {' and '.join(needed)}"
        elif error["type"] == "missing":
            yield path, f"{shown} is missing; it must be {allowed(known.get(path))}"
        else:
            yield path, f"{shown} is {_value_of(error)}; it must be {allowed(known.get(path))}"


def _known_path(loc: tuple[int | str, ...], known: Mapping[KeyPath, Any]) -> KeyPath:
    """The longest known key path inside a pydantic location, which also names union branches."""
    path: KeyPath = ()
    for part in loc:
        if (*path, str(part)) in known:
            path = (*path, str(part))
    return path or tuple(str(part) for part in loc)


def _value_of(error: Any) -> str:
    inside = [str(part) for part in error["loc"] if isinstance(part, int)]
    return show_value(error["input"]) + (f" at position {inside[-1]}" if inside else "")


def show_value(value: Any) -> str:
    """A value of a job file as its author wrote it, in short."""
    if isinstance(value, str):
        return f'the text "{value if len(value) <= 60 else value[:57] + "..."}"'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"the map {{{', '.join(key_word(key) for key in value)}}}"
    if isinstance(value, list | tuple):
        shown = ", ".join(_item(each) for each in value)
        return f"the list [{shown if len(shown) <= 60 else shown[:57] + '...'}]"
    return str(value)


def _item(value: Any) -> str:
    """A value inside a list: text without quotes, the rest as above."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(key_word(key) for key in value)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_item(each) for each in value)}]"
    return key_word(value)


def _takes_any_key(annotation: Any) -> bool:
    """Whether a map with keys of its own choice is among what a type allows."""
    if get_origin(annotation) is Mapping:
        return True
    return any(_takes_any_key(part) for part in get_args(annotation))


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        section = _section_of(part)
        if section is not None:
            return section
    return None


def allowed(annotation: Any) -> str:
    """The values a type allows, in words."""
    return " or ".join(dict.fromkeys(_allowed(annotation)))


def _allowed(annotation: Any, bounds: tuple[Any, ...] = ()) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        yield from _allowed(inner, (*bounds, *metadata))
    elif origin is Literal:
        yield ", ".join(str(value) for value in get_args(annotation))
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _allowed(part, bounds)
    elif origin is tuple:
        yield f"a list of which each is {allowed(get_args(annotation)[0])}"
    elif annotation is bool:
        yield "true or false"
    elif annotation is int:
        yield "a whole number" + _range(bounds)
    elif annotation is float:
        yield "a number" + _range(bounds)
    elif annotation is str:
        yield "text" if not _range(bounds) else "text of at least one character"
    elif annotation is type(None):
        yield "null"
    else:
        section = _section_of(annotation)
        names = ", ".join(section.model_fields) if section is not None else ""
        if names == "column":
            yield "{column: NAME}"
            return
        yield f"a map with the keys {names}" if names else "a map"


def _range(bounds: tuple[Any, ...]) -> str:
    words: list[str] = []
    for bound in (part for item in bounds for part in getattr(item, "metadata", None) or [item]):
        for name, word in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            value = getattr(bound, name, None)
            if value is not None:
                words.append(f"{word} {value if isinstance(value, int) else format(value, 'g')}")
        if getattr(bound, "min_length", None) is not None:
            words.append("non-empty")
    if not words:
        return ""
    return (" " if words[0].startswith(("above", "below")) else " of ") + " and ".join(words)
