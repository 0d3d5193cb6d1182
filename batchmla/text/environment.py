"""The Jinja environments that templates run in: sandboxed, bounded, and keeping marks."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchmla.text.bounds import BoundedRange, Meter, check_operands, check_padding
from batchmla.text.control import ControlStrings
from batchmla.text.origin import followed
from batchmla.text.tracked import TrackedText

_OWN_NAMES = frozenset(name for name in vars(TrackedText) if not hasattr(str, name))


class NullValue(jinja2.Undefined):
    """A null cell: false, `none`, replaced by `default`, and an error where it becomes text."""

    def _refuse(self) -> NoReturn:
        raise jinja2.UndefinedError(f"column {self._undefined_name!r} is null")

    __str__ = _refuse
    __iter__ = _refuse
    __len__ = _refuse


class _Generator(CodeGenerator):
    """Counts the steps of what it compiles."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.meter.step()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:
            step = nodes.EnvironmentAttribute("meter.step()")
            node.test = nodes.And(step, node.test)
        super().visit_For(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.meter.weighed(" if is_slice else "(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} environment.meter.weighed(")
        self.visit(node.expr, frame)
        self.write(")")

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
    """The environment that chat templates expect, of one template. What a filter, a call or an
    operator makes of row text is marked; `origin.py` finds how.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset(["%", "*", "**", "+"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bounded_range = BoundedRange()
        self.meter = Meter()
        self.control = ControlStrings(())
        self.is_escaped = False  # whether a filter made text that escapes what is added to it
        self.moment = datetime.now()

    def start(self) -> None:
        """The rendering of a row begins; all its runs are given the same time."""
        self.moment = datetime.now()

    def concat(self, parts: Iterable[Any]) -> str:
        """All parts as one text."""
        text = TrackedText.concat(map(self._written, parts))
        self.meter.weigh(text)
        return text

    def _written(self, part: Any) -> str:
        if isinstance(part, str):
            return part
        written: str = self._followed(str(part), (part,), lambda taken: str(taken[0]), "string")
        return written

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, TrackedText) and attribute in _OWN_NAMES:
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, TrackedText) and isinstance(argument, str):
            return self.getattr(obj, str(argument))
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "call")
        check_padding(name, (owner, *args, *kwargs.values()))
        is_method = isinstance(owner, str | bytes)
        if is_method:
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        self.meter.weigh(owner, *args)
        made = super().call(context, obj, *args, **kwargs)
        if not is_method and obj is not self.globals.get("strftime_now"):
            return made  # macros mark what they write; other objects give what they hold

        def again(taken: Any) -> Any:
            method = getattr(taken[0], name) if is_method else obj
            return method(*taken[1], **taken[2])

        return self._followed(made, (owner, args, kwargs), again, name)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def again(taken: Any) -> Any:
            method = super(TemplateEnvironment, self).wrap_str_format(
                getattr(taken[0], value.__name__)
            )
            assert method is not None, "str.format of a text that is none"
            return method(*taken[1], **taken[2])

        def format_(*args: Any, **kwargs: Any) -> Any:
            taken = (value.__self__, args, kwargs)
            check_padding("format", (value.__self__, *args, *kwargs.values()))
            return self._followed(wrapped(*args, **kwargs), taken, again, "format")

        return format_

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        self.meter.weigh(left, right)
        made = super().call_binop(context, operator, left, right)
        apply = self.binop_table[operator]
        return self._followed(made, (left, right), lambda taken: apply(*taken), operator)

    def remarking(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose text remembers that it was made of row text."""

        @wraps(plain)
        def filter_(*args: Any, **kwargs: Any) -> Any:
            check_padding(name, (*args, *kwargs.values()))
            self.meter.weigh(*args)
            made = plain(*args, **kwargs)
            self.is_escaped |= hasattr(made, "__html__")
            return self._followed(
                made, (args, kwargs), lambda taken: plain(*taken[0], **taken[1]), name
            )

        return filter_

    def _followed(self, made: Any, taken: Any, again: Callable[[Any], Any], operation: str) -> Any:
        return followed(made, taken, again, operation=operation, control=self.control)


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
        environment.filters[name] = environment.remarking(name, plain)
    environment.tests["none"] = lambda value: value is None or isinstance(value, NullValue)
    for name in ("in", "eq", "equalto", "=="):
        environment.tests[name] = _weighing(environment.meter, environment.tests[name])
    environment.globals["range"] = environment.bounded_range
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: environment.moment.strftime(form)
    return environment


def _weighing(meter: Meter, test: Any) -> Callable[..., bool]:
    def weighed(value: Any, other: Any) -> bool:
        return bool(test(value, meter.weighed(other)))

    return weighed


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
    joined: str = environment.concat(parts[1:])
    return joined


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
