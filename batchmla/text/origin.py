"""Which characters of a text that an operation made come from a row. It knows no templates.

An operation that lost marks, since it took a template's text as its subject, is repeated with that
text tracked, too. One that keeps none is repeated with every marked character of its operands
replaced by one that means nothing. Characters that come out the same at the same place owe nothing
to the row's: they are the template's. Where row text changes the shape of the result, nothing can
be told apart that way; all of it counts as row text then, and the control strings that the template
gave the operation are kept as doubts: which `template.py` refuses should they show.
"""

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from functools import partial
from typing import Any

import jinja2

from batchmla.text.control import ControlStrings
from batchmla.text.marked import MarkedText, Span
from batchmla.text.tracked import TrackedText, Watch

FAILURES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
_BLANK = "\U0010fffd"  # for private use: no operation changes it or finds a meaning in it
_BLANKS = re.compile(_BLANK + "+")
_BLANKS_AND_SPACE = re.compile(rf"[{_BLANK}\s]+")
_ANY = re.compile(r".", re.DOTALL)
_NO_SPACE = re.compile(r"\S")


def leaves(value: Any, kind: type[Any]) -> Iterator[Any]:
    """Every `kind` in nested lists and maps, keys included."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(key, kind)
            yield from leaves(item, kind)
    elif isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
        for item in value:
            yield from leaves(item, kind)


def mapped(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """`value` with every `kind` in nested lists and maps changed, keys included."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {
            mapped(key, kind, change): mapped(item, kind, change) for key, item in value.items()
        }
    if isinstance(value, list):
        return [mapped(item, kind, change) for item in value]
    if type(value) is tuple:
        return tuple(mapped(item, kind, change) for item in value)
    return value


def followed(
    made: Any,
    taken: Any,
    again: Callable[[Any], Any],
    *,
    operation: str,
    control: ControlStrings,
) -> Any:
    """`made`, the outcome of `again(taken)`, with the marks that its characters deserve."""
    if not isinstance(made, str) or not getattr(made, "is_rough", True):
        return made
    row_texts = list(leaves(taken, TrackedText))
    has_bytes = next(leaves(taken, bytes), None) is not None
    if not row_texts and not has_bytes:
        return made
    if any(made is leaf for leaf in leaves(taken, str)):  # it was only picked
        return made
    watch: Watch | None = next((t.watch for t in row_texts if t.watch is not None), None)
    if watch is not None:
        watch.append(operation)
    text = str.__str__(made)
    doubts = frozenset().union(*(row_text.doubts for row_text in row_texts))
    spans = None
    if not has_bytes:
        spans = _kept_spans(text, taken, again)
        if spans is None:
            spans = _spans(text, taken, again)
    if spans is None:
        doubts |= _doubts(taken, control)
        return TrackedText.of(MarkedText.of_row(text), watch, doubts=doubts)
    return TrackedText.of(MarkedText(text, spans), watch, doubts=doubts)


def _kept_spans(text: str, taken: Any, again: Callable[[Any], Any]) -> tuple[Span, ...] | None:
    """The row's part of `text` where tracked texts keep it by themselves."""
    try:
        made = again(mapped(taken, str, _tracked))
    except (jinja2.TemplateError, *FAILURES):
        return None
    is_kept = isinstance(made, TrackedText) and not getattr(made, "is_rough", True)
    return made.spans if is_kept and str.__str__(made) == text else None


def _tracked(text: str) -> TrackedText:
    if isinstance(text, TrackedText):
        return text
    return TrackedText.of(MarkedText(str.__str__(text)))


def _spans(text: str, taken: Any, again: Callable[[Any], Any]) -> tuple[Span, ...] | None:
    """The row's part of `text`, None if it cannot be told."""
    if _BLANK in text:
        return None
    # White space first like all else, then kept, since it may decide on the shape.
    for hidden, found in ((_ANY, _BLANKS), (_NO_SPACE, _BLANKS_AND_SPACE)):
        try:
            blank = again(mapped(taken, TrackedText, partial(_blanked, hidden)))
        except (jinja2.TemplateError, *FAILURES):
            continue
        if not isinstance(blank, str) or len(blank) != len(text):
            continue
        spans = tuple(hit.span() for hit in found.finditer(blank))
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        kept = zip(edges[::2], edges[1::2], strict=True)
        if all(blank[a:b] == text[a:b] for a, b in kept):
            return spans
    return None


def _blanked(hidden: re.Pattern[str], row_text: TrackedText) -> str:
    marked = row_text.marked()
    return "".join(
        hidden.sub(_BLANK, marked.text[a:b]) if is_row else marked.text[a:b]
        for a, b, is_row in marked.runs()
    )


def _doubts(taken: Any, control: ControlStrings) -> frozenset[str]:
    """The control strings, in any case of letters, that the template gave the operation."""
    own: list[str] = []
    for leaf in leaves(taken, str):
        own += leaf.marked().unmarked() if isinstance(leaf, TrackedText) else [leaf]
    return frozenset().union(*(control.alike(part) for part in own))
