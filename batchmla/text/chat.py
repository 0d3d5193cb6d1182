"""A model's chat template: messages to marked text, as transformers' apply_chat_template does it.

A template that passes the messages' text through unread is run once per sequence of roles; every
further conversation of that shape is put together from the text between its messages.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchmla.errors import JobError
from batchmla.text.control import ControlStrings
from batchmla.text.environment import chat_environment
from batchmla.text.marked import MarkedText
from batchmla.text.template import MarkedTemplate, TemplateFault
from batchmla.text.template_files import find_template
from batchmla.text.tokenizer import Tokenizer

Thinking = Literal["auto", "on", "off"]
Message = Mapping[str, Any]  # role: str, content: MarkedText or parts, and what else it has
Tools = Sequence[Mapping[str, Any]]  # definitions as transformers takes them

SWITCHES = ("thinking", "enable_thinking")
_EFFORT = "reasoning_effort"
_MAX_SHAPES = 1024
_PAD = "\u3000\n\t "  # white space that no template writes
_MARKER = re.compile("\ue0f0([0-9]+)\ue0f1")
_SAMPLES = (
    ' \n<b class="x">&amp;\'é\\n {{ y }} {% z %}</b>\t\n ',
    "<think>\n1\n</think>\r\nQ: %s {0} \u2028\U0001f600",
    "a",
)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a message's text goes, and at which ends it is trimmed."""

    message: int
    trim_left: bool
    trim_right: bool


_Shape = tuple[str | _Slot, ...]


def has_switch(source: str) -> bool:
    """Whether a template can switch thinking."""
    try:
        names = MarkedTemplate(source, chat_environment(), ControlStrings(()))
    except TemplateFault:
        return False
    return any(names.reads(name) for name in SWITCHES)


class ChatTemplate:
    """One chat template with the thinking switch set, and the tools of all conversations."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        where: str,
        thinking: Thinking = "auto",
        tools: Tools = (),
        has_tools: bool = False,
    ) -> None:
        """`where` names the template in messages; `has_tools`: whether `render` will be given some.

        Raises JobError if it cannot be used so.
        """
        try:
            self._template = MarkedTemplate(source, chat_environment(), tokenizer.control)
        except TemplateFault as fault:
            raise JobError(f"{where} is not a valid chat template: {fault}") from None
        self.source = self.template = source
        self.where = where
        self.switches = tuple(name for name in SWITCHES if self._template.reads(name))
        if thinking != "auto" and not self.switches:
            raise JobError(
                f"reasoning.thinking: {thinking} needs a chat template with a thinking switch, and "
                f"{where} has none ({' or '.join(SWITCHES)}); leave it at auto"
            )
        if (tools or has_tools) and not self._template.reads("tools"):
            raise JobError(
                f"prompt.tools: {where} has no place for tool definitions; give a template that "
                "uses the variable tools as prompt.chat_template, or leave prompt.tools out"
            )
        self._constants: dict[str, Any] = {
            **tokenizer.special_tokens,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        if thinking != "auto":
            self._constants |= dict.fromkeys(self.switches, thinking == "on")
        self._is_steady = not self._template.reads("strftime_now")
        self._shapes: dict[tuple[str, ...], _Shape | None] = {}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        tokenizer: Tokenizer,
        *,
        thinking: Thinking = "auto",
        override: str | Path | None = None,
        tools: Tools = (),
        has_tools: bool = False,
    ) -> "ChatTemplate":
        """The template of a model folder, or `override`: a file in its place, or a name of many."""
        needs_tools = has_tools or bool(tools)
        found = find_template(folder, tokenizer, has_tools=needs_tools, asked=override)
        if found is None:
            raise JobError(
                f"{folder} has no chat template; write the whole prompt with prompt.raw, or give a "
                "template file as prompt.chat_template"
            )
        source, where = found
        return cls(
            source, tokenizer, where=where, thinking=thinking, tools=tools, has_tools=has_tools
        )

    def render(
        self, messages: Sequence[Message], *, tools: Tools = (), effort: str | None = None
    ) -> MarkedText:
        """The prompt of a conversation, ready for the next assistant turn.

        `tools` are this conversation's own, `effort` the level of reasoning that it asks for.
        Raises TemplateFault when the template refuses the conversation.
        """
        if tools and not self._template.reads("tools"):
            raise TemplateFault("it has no place for tool definitions")
        if tools or effort is not None:
            return self._render(messages, tools, effort)
        roles = _plain_roles(messages) if self._is_steady else None
        if roles is None:
            return self._render(messages)
        if roles not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                return self._render(messages)
            self._shapes[roles] = self._shape(roles)
        shape = self._shapes[roles]
        return self._render(messages) if shape is None else _filled(shape, messages)

    def _render(
        self, messages: Sequence[Message], tools: Tools = (), effort: str | None = None
    ) -> MarkedText:
        values = {**self._constants, "messages": list(messages)}
        if tools:
            values["tools"] = list(tools)
        if effort is not None:
            values |= self._effort(effort)
        return self._template.render(values)

    def _effort(self, effort: str) -> dict[str, Any]:
        """The variables that ask for a level of reasoning; "none" is the switch where there is one.

        Raises TemplateFault when the template knows neither.
        """
        if effort == "none" and self.switches:
            return dict.fromkeys(self.switches, False)
        if not self._template.reads(_EFFORT):
            raise TemplateFault(f"it has no variable {_EFFORT}")
        return {_EFFORT: effort}

    def _shape(self, roles: tuple[str, ...]) -> _Shape | None:
        """The text around the messages of these roles, or None if it depends on what they say."""
        markers = [f"{_PAD}\ue0f0{n}\ue0f1{_PAD}" for n in range(len(roles))]
        try:
            text, watch = self._template.render_watched(
                {**self._constants, "messages": _conversation(roles, markers)}
            )
            if watch:
                return None
            shape = _parsed(text)
            for first in range(len(_SAMPLES)):
                texts = [_SAMPLES[(first + n) % len(_SAMPLES)] for n in range(len(roles))]
                sample = _conversation(roles, texts)
                if _filled(shape, sample).text != self._render(sample).text:
                    return None
        except TemplateFault:
            return None
        return shape


def _conversation(roles: Sequence[str], texts: Sequence[str]) -> list[dict[str, Any]]:
    pairs = zip(roles, texts, strict=True)
    return [{"role": role, "content": MarkedText(text)} for role, text in pairs]


def _plain_roles(messages: Sequence[Message]) -> tuple[str, ...] | None:
    """The roles, when every message is a role and a text that is more than white space."""
    roles: list[str] = []
    for message in messages:
        content = message.get("content")
        if len(message) != 2 or not isinstance(content, MarkedText):
            return None
        if not content.text or content.text.isspace():
            return None
        roles.append(message["role"])
    return tuple(roles)


def _parsed(text: str) -> _Shape:
    shape: list[str | _Slot] = []
    at = 0
    for marker in _MARKER.finditer(text):
        start, end = marker.span()
        is_left_whole = text.endswith(_PAD, 0, start)
        is_right_whole = text.startswith(_PAD, end)
        shape.append(text[at : start - len(_PAD) if is_left_whole else start])
        shape.append(_Slot(int(marker.group(1)), not is_left_whole, not is_right_whole))
        at = end + len(_PAD) if is_right_whole else end
    shape.append(text[at:])
    return tuple(shape)


def _filled(shape: _Shape, messages: Sequence[Message]) -> MarkedText:
    parts: list[MarkedText | str] = []
    for part in shape:
        if isinstance(part, _Slot):
            content: MarkedText = messages[part.message]["content"]
            if part.trim_left or part.trim_right:
                content = content.trimmed(left=part.trim_left, right=part.trim_right)
            parts.append(content)
        else:
            parts.append(part)
    return MarkedText.join(parts)
