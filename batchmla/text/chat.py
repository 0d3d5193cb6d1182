"""A model's chat template: messages to marked text, as transformers' apply_chat_template does it.

A template that passes the messages' text through unread is run once per sequence of roles; every
further conversation of that shape is put together from the text between its messages.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchmla.errors import JobError
from batchmla.text.environment import chat_environment
from batchmla.text.marked import MarkedText
from batchmla.text.template import MarkedTemplate, TemplateFault
from batchmla.text.tokenizer import Tokenizer

Thinking = Literal["auto", "on", "off"]
Message = Mapping[str, Any]  # role: str, content: MarkedText or parts, and what else it has

SWITCHES = ("thinking", "enable_thinking")
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


class ChatTemplate:
    """One chat template with the thinking switch set."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, where: str, thinking: Thinking = "auto"
    ) -> None:
        """`where` names the template in messages. Raises JobError if it cannot be used so."""
        try:
            self._template = MarkedTemplate(source, chat_environment(), tokenizer.control)
        except TemplateFault as fault:
            raise JobError(f"{where} is not a valid chat template: {fault}") from None
        self.source = source
        self.where = where
        self.switches = tuple(name for name in SWITCHES if self._template.reads(name))
        if thinking != "auto" and not self.switches:
            raise JobError(
                f"reasoning.thinking: {thinking} needs a chat template with a thinking switch, and "
                f"{where} has none ({' or '.join(SWITCHES)}); leave it at auto"
            )
        self._constants: dict[str, Any] = {
            **tokenizer.special_tokens,
            "tools": None,
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
    ) -> "ChatTemplate":
        """The template of a model folder, or the file `override` in its place."""
        if override is not None:
            return cls(_read(Path(override)), tokenizer, where=str(override), thinking=thinking)
        found = find_template(folder, tokenizer)
        if found is None:
            raise JobError(
                f"{folder} has no chat template; write the whole prompt with prompt.raw, or give a "
                "template file as prompt.chat_template"
            )
        source, where = found
        return cls(source, tokenizer, where=where, thinking=thinking)

    def render(self, messages: Sequence[Message]) -> MarkedText:
        """The prompt of a conversation, ready for the next assistant turn.

        Raises TemplateFault when the template refuses the conversation.
        """
        roles = _plain_roles(messages) if self._is_steady else None
        if roles is None:
            return self._render(messages)
        if roles not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                return self._render(messages)
            self._shapes[roles] = self._shape(roles)
        shape = self._shapes[roles]
        return self._render(messages) if shape is None else _filled(shape, messages)

    def _render(self, messages: Sequence[Message]) -> MarkedText:
        return self._template.render({**self._constants, "messages": list(messages)})

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


def find_template(folder: str | Path, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """A model folder's chat template and where it stands, or None."""
    folder = Path(folder)
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file), str(file)
    in_config = tokenizer.config.get("chat_template")
    file = folder / "tokenizer_config.json"
    if in_config is None and (folder / "chat_template.json").is_file():
        file = folder / "chat_template.json"
        in_config = json.loads(_read(file)).get("chat_template")
    if in_config is None:
        return None
    if isinstance(in_config, str):
        return in_config, str(file)
    named = {
        str(entry.get("name")): entry.get("template")
        for entry in (in_config if isinstance(in_config, list) else ())
        if isinstance(entry, Mapping)
    }
    default = named.get("default")
    if not isinstance(default, str):
        names = ", ".join(sorted(named)) or "none"
        raise JobError(
            f"{file}: its chat templates ({names}) hold no 'default'; give the one to use as "
            "prompt.chat_template"
        )
    return default, f"{file} (default)"


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except FileNotFoundError:
        raise JobError(f"prompt.chat_template: {file} does not exist") from None
    except (OSError, UnicodeDecodeError) as fault:
        raise JobError(f"prompt.chat_template: {file} cannot be read: {fault}") from None


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
