"""Jinja templates whose output remembers what came from a row. It knows no chat formats.

A template is run in an immutable sandbox. Row text goes in as `TrackedText`, so that the marks
follow it through the template's own string work. Where a row holds text that could become a
control token and the marks were lost on the way, the template is run again with each such piece of
row text replaced by one private-use character, which no operation can lose: that output is safe by
construction and is used instead.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchmla.text.bounds import BoundedRange, check_operands, check_padding
from batchmla.text.control import ControlStrings
from batchmla.text.marked import MarkedText
from batchmla.text.tracked import TrackedText, Watch

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

_MAX_PROVEN = 4096
_FAILURES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class TemplateFault(Exception):
    """The template refused its values or failed on them; the text is a sentence's second half."""


class NullValue(jinja2.Undefined):
    """A null cell: false, `none`, replaced by `default`, and an error where it becomes text."""

    def _refuse(self) -> NoReturn:
        raise jinja2.UndefinedError(f"column {self._undefined_name!r} is null")

    __str__ = _refuse
    __iter__ = _refuse
    __len__ = _refuse


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates expect. Text that a filter, a call or `%` makes of row
    text without keeping its marks is row text from end to end.
    """

    code_generator_class = _Generator
    concat = staticmethod(TrackedText.concat)
    intercepted_binops = frozenset(["%", "*", "**"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bounded_range = BoundedRange()

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "call")
        check_padding(name, (owner, *args, *kwargs.values()))
        made = super().call(context, obj, *args, **kwargs)
        return _remarked(made, (owner, args, kwargs), name)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def format_(*args: Any, **kwargs: Any) -> str:
            check_padding("format", (value.__self__, *args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return format_

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        made = super().call_binop(context, operator, left, right)
        return _remarked(made, (left, right), operator)


def chat_environment() -> TemplateEnvironment:
    """As model authors expect it: block lines leave no white space, unknown names are empty."""
    return _furnished(
        TemplateEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
    )


def column_environment() -> TemplateEnvironment:
    """For prompt templates of a job: every character counts, an unknown name is an error."""
    return _furnished(
        TemplateEnvironment(
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            extensions=[loopcontrols],
            finalize=_finalize,
        )
    )


def _finalize(value: Any) -> Any:
    """Keeps Python's words for what is not text out of a prompt."""
    if value is None or (isinstance(value, float) and value != value):
        raise jinja2.UndefinedError("it would write a null or NaN value")
    if isinstance(value, list | tuple | dict | bytes):
        raise jinja2.UndefinedError("it would write a list or map; use | join(', ') or | tojson")
    return value


def _furnished(environment: TemplateEnvironment) -> TemplateEnvironment:
    environment.filters["tojson"] = _tojson
    environment.filters["join"] = _join
    for name, plain in environment.filters.items():
        environment.filters[name] = _remarking(name, plain)
    environment.tests["none"] = lambda value: value is None or isinstance(value, NullValue)
    environment.globals["range"] = environment.bounded_range
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _remarking(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose text remembers that it was made of row text."""

    @wraps(plain)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        check_padding(name, (*args, *kwargs.values()))
        return _remarked(plain(*args, **kwargs), (args, kwargs), name)

    return filter_


def _remarked(made: Any, taken: Any, operation: str) -> Any:
    if not isinstance(made, str):
        return made
    if isinstance(made, TrackedText):
        if hasattr(made, "spans"):
            return made
        # what the sandbox's own str.format makes of a row text: a copy of its type without marks
        return TrackedText.of(MarkedText.of_row(str.__str__(made)))
    row_text = next(_leaves(taken, TrackedText), None)
    if row_text is None:
        return made
    if row_text.watch is not None:
        row_text.watch.append(operation)
    return TrackedText.of(MarkedText.of_row(str.__str__(made)), row_text.watch)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    items = list(value)
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    parts: list[Any] = []
    for item in items:
        parts += [d, item]
    return TrackedText.concat(parts[1:])


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


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
        self.source = source
        self._range = environment.bounded_range
        self._control = control
        # The unmarked text of outputs whose control strings are known to be the template's own.
        self._proven: set[tuple[str, ...]] = set()

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
        tracked = self._run(_replaced(values, None))
        if tracked.unmarked() in self._proven:
            return tracked
        dangers = {
            leaf.text[a + start : b + start]
            for leaf in _leaves(values, MarkedText)
            for start, end in leaf.spans
            for a, b in self._control.dangers(leaf.text[start:end])
        }
        if not dangers:
            return tracked
        safe = self._run_with_stand_ins(values, dangers)
        allowed = [match.token.token_id for match in self._control.in_template(safe)]
        if [match.token.token_id for match in self._control.in_template(tracked)] == allowed:
            if len(self._proven) < _MAX_PROVEN:
                self._proven.add(tracked.unmarked())
            return tracked
        return safe

    def render_watched(self, values: Mapping[str, Any]) -> tuple[str, Watch]:
        """The plain output, and every operation of the template that read row text."""
        watch: Watch = []
        return self._run(_replaced(values, watch)).text, watch

    def _run(self, values: Mapping[str, Any]) -> MarkedText:
        self._range.start()
        try:
            text = self._template.render(values)
        except (jinja2.TemplateError, *_FAILURES) as fault:
            raise TemplateFault(str(fault) or type(fault).__name__) from None
        return text.marked() if isinstance(text, TrackedText) else MarkedText(text)

    def _run_with_stand_ins(self, values: Mapping[str, Any], dangers: set[str]) -> MarkedText:
        taken = set(self.source).union(*(leaf.text for leaf in _leaves(values, MarkedText)))
        codes = (chr(code) for part in _PRIVATE_USE for code in part if chr(code) not in taken)
        free = list(islice(codes, len(dangers)))
        if len(free) < len(dangers):
            raise TemplateFault(f"it holds {len(dangers)} different control strings, too many")
        stand_ins = dict(zip(sorted(dangers), free, strict=True))
        marked = self._run(_hidden(values, self._control, stand_ins))
        originals = {stand_in: danger for danger, stand_in in stand_ins.items()}
        parts: list[MarkedText | str] = []
        at = 0
        for here, character in enumerate(marked.text):
            if character in originals:
                parts += [marked.cut(at, here), MarkedText.of_row(originals[character])]
                at = here + 1
        return MarkedText.join([*parts, marked.cut(at, len(marked.text))])


def _leaves(value: Any, kind: type[Any]) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item, kind)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, kind)


def _replaced(value: Any, watch: Watch | None) -> Any:
    """`value` with every `MarkedText` as `TrackedText`."""
    if isinstance(value, MarkedText):
        return TrackedText.of(value, watch)
    if isinstance(value, Mapping):
        return {key: _replaced(item, watch) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, watch) for item in value]
    return value


def _hidden(value: Any, control: ControlStrings, stand_ins: Mapping[str, str]) -> Any:
    """`value` with each dangerous piece of row text replaced by its stand-in."""
    if isinstance(value, MarkedText):
        parts: list[MarkedText | str] = []
        for start, end, is_row in value.runs():
            run = value.text[start:end]
            if not is_row:
                parts.append(run)
                continue
            at = 0
            for a, b in control.dangers(run):
                parts += [MarkedText.of_row(run[at:a]), MarkedText.of_row(stand_ins[run[a:b]])]
                at = b
            parts.append(MarkedText.of_row(run[at:]))
        return TrackedText.of(MarkedText.join(parts))
    if isinstance(value, Mapping):
        return {key: _hidden(item, control, stand_ins) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item, control, stand_ins) for item in value]
    return value
