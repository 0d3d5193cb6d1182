"""Jinja templates whose output remembers what came from a row. It knows no chat formats.

Row text goes in as `TrackedText`, so that the marks follow it through the template's own string
work. Every operation yields marks that are exact, or too many where that takes no control string
from the template; where it might, the row is refused. Where a row holds control strings, two more
runs on plain strings check this: one as it is, whose text is the prompt's, and one with every
character of these control strings replaced by a stand-in for private use. If both say the same, all
that became stand-ins is the row's. If not, the template's logic looked at the control strings, and
the marks alone decide.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import jinja2
from jinja2 import meta, nodes

from batchmla.text.control import ControlStrings
from batchmla.text.environment import TemplateEnvironment
from batchmla.text.marked import MarkedText, Span
from batchmla.text.origin import FAILURES, leaves, mapped
from batchmla.text.tracked import TrackedText, Watch

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFD))


class TemplateFault(Exception):
    """The template refused its values or failed on them; the text is a sentence's second half."""


class MarkedTemplate:
    """A compiled template. `control` says which row text needs its marks."""

    def __init__(
        self, source: str, environment: TemplateEnvironment, control: ControlStrings
    ) -> None:
        """Raises `TemplateFault` when the source is not a template."""
        try:
            self._tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as fault:
            raise TemplateFault(f"line {fault.lineno}: {fault.message}") from None
        if self._tree.find(nodes.EvalContextModifier) is not None:
            raise TemplateFault("{% autoescape %} is not supported; use the filter | e")
        environment.control = control
        self.source = source
        self._environment = environment
        self._control = control

    @property
    def names(self) -> frozenset[str]:
        """The names that the template takes from outside."""
        return frozenset(meta.find_undeclared_variables(self._tree))

    def reads(self, name: str) -> bool:
        """Whether the template uses `name`, be it set by itself or from outside."""
        return any(
            node.name == name and node.ctx == "load" for node in self._tree.find_all(nodes.Name)
        )

    def outputs(self) -> list[str | nodes.Name] | None:
        """The template as literals and plain names, or None when it is more than that."""
        flat: list[str | nodes.Name] = []
        for statement in self._tree.body:
            if not isinstance(statement, nodes.Output):
                return None
            for node in statement.nodes:
                if isinstance(node, nodes.TemplateData):
                    flat.append(node.data)
                elif isinstance(node, nodes.Name):
                    flat.append(node)
                else:
                    return None
        return flat

    def render(self, values: Mapping[str, Any]) -> MarkedText:
        """The output for `values`, whose row text are `MarkedText`s at any depth."""
        self._environment.start()
        tracked = self._run(_replaced(values, None))
        self._refuse_doubts(tracked)
        marked = _marked(tracked)
        found = {
            run[a:b]
            for leaf in leaves(values, MarkedText)
            for start, end in leaf.spans
            for run in (leaf.text[start:end],)
            for a, b in self._control.spans(run)
        }
        if not found and not self._environment.is_escaped:
            return marked
        plain = self._run(mapped(values, MarkedText, lambda leaf: leaf.text))
        if plain != marked.text:
            raise TemplateFault(
                "it changes text of the row in a way that cannot be followed; use simpler filters"
            )
        if not found or not self._control.in_template(marked):
            return marked
        return marked.also(self._proven_row(values, found, plain))

    def render_watched(self, values: Mapping[str, Any]) -> tuple[str, Watch]:
        """The plain output, and every operation of the template that read row text."""
        watch: Watch = []
        self._environment.start()
        return str.__str__(self._run(_replaced(values, watch))), watch

    def _run(self, values: Mapping[str, Any]) -> str:
        self._environment.bounded_range.start()
        self._environment.meter.start()
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, *FAILURES) as fault:
            raise TemplateFault(str(fault) or type(fault).__name__) from None

    def _refuse_doubts(self, tracked: str) -> None:
        if not isinstance(tracked, TrackedText) or not tracked.doubts:
            return
        text, marked = str.__str__(tracked), tracked.marked()
        for a, b in self._control.spans(text):
            if marked.cut(a, b).spans and text[a:b].casefold() in tracked.doubts:
                raise TemplateFault(
                    f"one operation works on the control string {text[a:b]!r} together with text "
                    "of the row, so that it is not certain which of them it stems from; keep "
                    "control strings out of filters and calls over row text"
                )

    def _proven_row(self, values: Mapping[str, Any], found: set[str], plain: str) -> list[Span]:
        """Where `plain` holds characters of the row's control strings, as far as stand-ins show."""
        taken = set(self.source).union(*(leaf.text for leaf in leaves(values, MarkedText)), plain)
        codes = (chr(code) for part in _PRIVATE_USE for code in part if chr(code) not in taken)
        stand_ins = {text: "".join(islice(codes, len(text))) for text in sorted(found)}
        if any(len(text) != len(stand_in) for text, stand_in in stand_ins.items()):
            raise TemplateFault(f"it holds {len(found)} different control strings, too many")
        try:
            hidden = self._run(
                mapped(values, MarkedText, lambda leaf: _hidden(leaf, self._control, stand_ins))
            )
        except TemplateFault:
            return []
        originals = {
            ord(code): original
            for text, stand_in in stand_ins.items()
            for code, original in zip(stand_in, text, strict=True)
        }
        if hidden.translate(originals) != plain:
            return []
        return [(at, at + 1) for at, code in enumerate(hidden) if ord(code) in originals]


def _marked(text: str) -> MarkedText:
    return text.marked() if isinstance(text, TrackedText) else MarkedText(text)


def _replaced(values: Any, watch: Watch | None) -> Any:
    """`values` with every `MarkedText` as `TrackedText`."""
    return mapped(values, MarkedText, lambda leaf: TrackedText.of(leaf, watch))


def _hidden(leaf: MarkedText, control: ControlStrings, stand_ins: Mapping[str, str]) -> str:
    """A text with each control string of the row replaced by its stand-ins."""
    parts: list[str] = []
    for start, end, is_row in leaf.runs():
        run = leaf.text[start:end]
        at = 0
        for a, b in control.spans(run) if is_row else ():
            parts += [run[at:a], stand_ins[run[a:b]]]
            at = b
        parts.append(run[at:])
    return "".join(parts)
