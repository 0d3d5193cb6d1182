"""Tool calls in the content of a completion: what all syntaxes share.

Calls stand in sections between two strings. A section is read as a whole: its calls are taken out
of the content, or it stays there as the model wrote it and the first fault is reported. Arguments
are what the model wrote or a fault, never a guess.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchmla.text.json_text import members

_SHOWN = 200  # characters of faulty markup in a message
_MAX_ENDS = 32  # of one section: its end may also stand inside a JSON string


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class BadCall(Exception):
    """Why a section cannot be read, as a sentence's first half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What a content holds besides calls, the calls, and the first markup that is none."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None


# parameter name → JSON schema, of the function with a name; {} where nothing is known
Schemas = Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSyntax:
    """How a format writes calls: sections from `begin` to `end`, each read by `read`.

    `lead` is what the format puts between the text and a section. `traces` are strings that stand
    in calls only: one that is left over was meant as a call.
    """

    begin: str
    end: str
    read: Callable[[str, Schemas], list[ToolCall]]
    lead: str = ""
    traces: tuple[str, ...] = ()

    def parse(self, content: str, schemas: Schemas) -> Calls:
        """The calls in `content`."""
        found = _Found()
        at = 0
        while (start := content.find(self.begin, at)) >= 0:
            stop, calls, reason = self._section(content, start, schemas)
            if reason is None:
                found.text(content[at:start].removesuffix(self.lead), self)
                found.calls += calls
            else:
                found.text(content[at:start], self)
                found.fault(reason, content[start:stop])
                found.kept.append(content[start:stop])
            at = stop
        found.text(content[at:], self)
        return Calls(content="".join(found.kept), calls=tuple(found.calls), error=found.error)

    def _section(
        self, content: str, start: int, schemas: Schemas
    ) -> tuple[int, list[ToolCall], str | None]:
        """Where the section at `start` ends, its calls, and the reason if it has none."""
        inside = start + len(self.begin)
        first_stop, first_reason = len(content), f"{self.begin} is never closed"
        end = inside - 1
        for attempt in range(_MAX_ENDS):
            end = content.find(self.end, end + 1)
            if end < 0:
                break
            stop = end + len(self.end)
            try:
                return stop, self.read(content[inside:end], schemas), None
            except BadCall as fault:
                if attempt == 0:
                    first_stop, first_reason = stop, str(fault)
        return first_stop, [], first_reason


@dataclass(slots=True)
class _Found:
    kept: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    error: str | None = None

    def text(self, text: str, syntax: ToolSyntax) -> None:
        """Text between sections."""
        self.kept.append(text)
        places = [place for trace in syntax.traces if (place := text.find(trace)) >= 0]
        if places:
            self.fault(f"part of a call outside {syntax.begin}", text[min(places) :])

    def fault(self, reason: str, markup: str) -> None:
        if self.error is None:
            more = "…" if len(markup) > _SHOWN else ""
            self.error = f"{reason}: {markup[:_SHOWN]}{more}"


def no_schemas(name: str) -> Mapping[str, Any]:
    """For callers that know no definitions."""
    return {}


def call_of(name: str, arguments: str) -> ToolCall:
    """A call, if it has a name and its arguments are a JSON object. Raises BadCall."""
    if not name or name != name.strip():
        raise BadCall(f"a call has the name {name!r}")
    try:
        name.encode()
        members(arguments)
    except UnicodeEncodeError:
        raise BadCall("a call has a name with half a character in it") from None
    except ValueError as fault:
        raise BadCall(f"the arguments of {name} cannot be read: {fault}") from None
    return ToolCall(name, arguments)


def enclosed(body: str, begin: str, end: str) -> list[str]:
    """The texts between `begin` and `end`, one after the other with white space between.

    Raises BadCall for anything else in `body`, and for none at all.
    """
    found: list[str] = []
    at = 0
    while rest := body[at:].lstrip():
        at = len(body) - len(rest)
        stop = body.find(end, at)
        if not rest.startswith(begin) or stop < 0:
            raise BadCall(f"a call is not enclosed in {begin} and {end}")
        found.append(body[at + len(begin) : stop])
        at = stop + len(end)
    if not found:
        raise BadCall("there is no call in it")
    return found
