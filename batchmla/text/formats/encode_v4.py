"""The prompts of DeepSeek-V4, which ships no chat template.

Results of tools are blocks of a user's turn. Reasoning of earlier answers stays where tools are
given, else it is dropped up to the last turn. A level of effort is a text before all else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchmla.text.formats.deepseek_v4 import BLOCK
from batchmla.text.formats.turns import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    Message,
    Part,
    Tools,
    calls_block,
    calls_of,
    content_of,
    last_turn,
    plain,
    reasoning_of,
    refuse_open_end,
    split_reasoning,
    tools_section,
)
from batchmla.text.formats.wording import Wording
from batchmla.text.marked import MarkedText
from batchmla.text.template import TemplateFault

WORDING_FILE = "encoding_dsv4.py"
_TOOLS = "TOOLS_TEMPLATE"


@dataclass(slots=True)
class _Turn:
    """A user's turn: texts and results of tools, each with its place among the calls."""

    parts: list[tuple[int | None, MarkedText]] = field(default_factory=list)

    def text(self) -> MarkedText:
        """All parts; results in the order of the calls, at the places where results stand."""
        results = iter(sorted((p for p in self.parts if p[0] is not None), key=lambda p: p[0] or 0))
        written: list[Part] = []
        for call, text in self.parts:
            written.append("\n\n" if written else "")
            if call is None:
                written.append(text)
            else:
                written += ["<tool_result>", next(results)[1], "</tool_result>"]
        return MarkedText.join(written)


class EncoderV4:
    """Messages to the text of a prompt."""

    default_thinking = True

    def __init__(self, folder: Path) -> None:
        self.wording = Wording.find(folder, WORDING_FILE)
        self._efforts, self._default_effort = _efforts(self.wording)

    def encode(
        self, messages: Sequence[Message], tools: Tools, *, is_thinking: bool, effort: str | None
    ) -> MarkedText:
        """The prompt of a conversation. Raises TemplateFault for one that cannot be written."""
        refuse_open_end(messages)
        parts: list[Part] = [BOS, self._effort(effort, is_thinking)]
        messages = _merged([split_reasoning(message) for message in messages])
        section: list[Part] = []
        if tools:
            section = ["\n\n", tools_section(self.wording, _TOOLS, tools, WORDING_FILE)]
            if not any(message["role"] == "system" for message in messages):
                messages = [{"role": "system"}, *messages]
        keeps = is_thinking and bool(tools)  # the reasoning of all answers
        last = last_turn(messages)
        if is_thinking and not keeps:
            messages = [m for n, m in enumerate(messages) if m["role"] != "developer" or n >= last]
            last = last_turn(messages)
        for place, message in enumerate(messages):
            is_open = keeps or (is_thinking and place >= last)
            role = message["role"]
            if role == "assistant":
                parts += _answer(message, is_open)
                continue
            parts += [content_of(message)] if role == "system" else [USER, content_of(message)]
            if role == "system":
                parts += section
                section = []
            if place + 1 == len(messages) or messages[place + 1]["role"] == "assistant":
                parts += [ASSISTANT, THINK if is_open else END_THINK]
        return MarkedText.join(parts)

    def _effort(self, effort: str | None, is_thinking: bool) -> str:
        if not is_thinking:
            if effort is not None:
                raise TemplateFault(f"reasoning effort {effort} has no effect without thinking")
            return ""
        if effort is None:
            return self._efforts.get(self._default_effort or "", "")
        if effort not in self._efforts:
            known = ", ".join(self._efforts)
            raise TemplateFault(
                f"reasoning effort {effort} is not known; "
                + (f"the model knows {known}" if known else "their texts stand in encoding/")
                + ("" if known else f"{WORDING_FILE} of the model, which its folder lacks")
            )
        return self._efforts[effort]


def _efforts(wording: Wording | None) -> tuple[Mapping[str, str], str | None]:
    """Level → text, and the level that counts where none is asked for."""
    if wording is None:
        return {}, None
    default = wording.texts.get("DEFAULT_REASONING_EFFORT")
    table = wording.tables.get("REASONING_EFFORT_PROMPTS")
    if table is not None:
        return table, default
    most = wording.texts.get("REASONING_EFFORT_MAX")
    return ({} if most is None else {"high": "", "max": most}), default


def _answer(message: Message, is_open: bool) -> list[Part]:
    calls = calls_of(message)
    parts: list[Part] = [reasoning_of(message) or "", END_THINK] if is_open else []
    parts.append(content_of(message))
    if calls:
        parts += ["\n\n", *calls_block(BLOCK, calls)]
    return [*parts, EOS]


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Results of tools and the user's texts that follow one another as one turn of the user."""
    merged: list[Message] = []
    turn: _Turn | None = None
    order: dict[Any, int] = {}
    for message in messages:
        if message["role"] not in ("user", "tool"):
            merged.append(message)
            turn = None
            if calls := calls_of(message):
                order = {call["id"]: n for n, call in enumerate(calls) if call["id"] is not None}
            continue
        if turn is None:
            turn = _Turn()
            merged.append({"role": "user", "turn": turn})
        is_result = message["role"] == "tool"
        call = order.get(plain(message.get("tool_call_id")), 0) if is_result else None
        turn.parts.append((call, content_of(message)))
    return [
        {"role": "user", "content": message["turn"].text()} if "turn" in message else message
        for message in merged
    ]
