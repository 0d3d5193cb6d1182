"""Bounds on what a template may ask for, so that no row makes it run or grow without end.

The operations are those of which a few characters can ask for gigabytes or hours.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jinja2

T = TypeVar("T")

MAX_CHARACTERS = 2**24  # of a rendered prompt: above any context in use
MAX_DIGITS = 4096  # of a power
MAX_LOOPS = 10**6  # numbers that all `range`s of one rendering yield together
MAX_STEPS = 10**6  # of work in one rendering, see `Meter`: seconds

_OPERATION_STEPS = 8  # what a filter or a call costs beside the size of its operands
_STEP_CHARACTERS = 64  # of a text that is copied or searched

_PADDING = frozenset(
    (
        "center",
        "expandtabs",
        "format",
        "format_map",
        "indent",
        "ljust",
        "rjust",
        "wordwrap",
        "zfill",
    )
)
_WIDTH = re.compile(r"[0-9]+")


def bounded_parts(parts: Iterable[Any]) -> Iterator[str]:
    """The parts as texts, as long as they are not too many characters together."""
    left = MAX_CHARACTERS
    for part in parts:
        text = part if isinstance(part, str) else str(part)
        left -= str.__len__(text)
        if left < 0:
            raise _too_much()
        yield text


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuses a repetition, a power or a format that would not end or not fit."""
    if operator == "%" and isinstance(left, str):
        check_padding("format", (left, right))
    is_power = operator == "**" and isinstance(left, int) and isinstance(right, int)
    if is_power and left.bit_length() * right > MAX_DIGITS * 4:
        raise jinja2.TemplateRuntimeError(f"a power has more than {MAX_DIGITS} digits")
    for count, repeated in ((left, right), (right, left)):
        if operator != "*" or not isinstance(count, int):
            continue
        if isinstance(repeated, str | list | tuple) and count * _size(repeated) > MAX_CHARACTERS:
            raise _too_much()


def _size(value: str | list[Any] | tuple[Any, ...]) -> int:
    """Its length; a tracked text does not notice that it is read."""
    return str.__len__(value) if isinstance(value, str) else len(value)


def check_padding(name: str, arguments: Iterable[Any]) -> None:
    """Refuses a width beyond any prompt in the arguments of an operation that pads."""
    if name not in _PADDING:
        return
    for argument in arguments:
        if isinstance(argument, int):
            widths = [argument]
        elif isinstance(argument, str) and str.__len__(argument) < 1000:
            widths = [int(digits) for digits in _WIDTH.findall(str.__str__(argument))]
        else:
            continue
        if any(width > MAX_CHARACTERS for width in widths):
            raise _too_much()


class BoundedRange:
    """`range` with a limit on all that one rendering takes from it."""

    def __init__(self) -> None:
        self._left = MAX_LOOPS

    def start(self) -> None:
        """A rendering begins."""
        self._left = MAX_LOOPS

    def __call__(self, *arguments: int) -> range:
        made = range(*arguments)
        self._left -= len(made)
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(f"its ranges have more than {MAX_LOOPS:,} numbers")
        return made


class Meter:
    """Counts the work of one rendering, whether it writes or not, and ends it at `MAX_STEPS`.

    A step is one run of a block (a loop's body, a branch, a macro), one item that a loop's filter
    looks at, or one item of a list that an operation works through.
    """

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def start(self) -> None:
        """A rendering begins."""
        self._left = MAX_STEPS

    def step(self) -> bool:
        """One step; true, so that it can stand in a condition."""
        self._left -= 1
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(
                f"it takes more than {MAX_STEPS:,} steps: its loops are too long for this row"
            )
        return True

    def weigh(self, *operands: Any) -> None:
        """One operation on texts or collections."""
        for operand in operands:
            if isinstance(operand, str):
                self._left -= str.__len__(operand) // _STEP_CHARACTERS
            elif isinstance(operand, list | tuple | dict):
                self._left -= len(operand)
        self._left -= _OPERATION_STEPS
        self.step()

    def weighed(self, operand: T) -> T:
        """An operand of a comparison or of `in`, or a slice."""
        if isinstance(operand, str | list | tuple | dict):
            size = str.__len__(operand) // _STEP_CHARACTERS if isinstance(operand, str) else 0
            self._left -= size or len(operand)
            self.step()
        return operand


def _too_much() -> jinja2.TemplateRuntimeError:
    return jinja2.TemplateRuntimeError(f"it would write more than {MAX_CHARACTERS:,} characters")
