"""The prompts of DeepSeek-V3.2, which ships no chat template.

An answer is opened right behind the user's turn, with `<think>` where the model shall think and the
turn is the last one, else with `</think>`. Definitions of tools stand in a system message of their
own that comes first.
"""

from collections.abc import Sequence
from pathlib import Path

from batchmla.text.formats.deepseek_v32 import BLOCK
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
    reasoning_of,
    refuse_open_end,
    split_reasoning,
    tools_section,
)
from batchmla.text.formats.wording import Wording
from batchmla.text.marked import MarkedText
from batchmla.text.template import TemplateFault

WORDING_FILE = "encoding_dsv32.py"
_TOOLS = "TOOLS_SYSTEM_TEMPLATE"


class EncoderV32:
    """Messages to the text of a prompt."""

    default_thinking = False

    def __init__(self, folder: Path) -> None:
        self.wording = Wording.find(folder, WORDING_FILE)

    def encode(
        self, messages: Sequence[Message], tools: Tools, *, is_thinking: bool, effort: str | None
    ) -> MarkedText:
        """The prompt of a conversation. Raises TemplateFault for one that cannot be written."""
        refuse_open_end(messages)
        if effort is not None:
            raise TemplateFault(f"DeepSeek-V3.2 knows no reasoning effort {effort}")
        messages = [split_reasoning(message) for message in messages]
        if is_thinking and messages[-1]["role"] == "user":
            last = last_turn(messages)
            messages = [m for n, m in enumerate(messages) if m["role"] != "developer" or n >= last]
        parts: list[Part] = [BOS]
        if tools:
            parts += ["\n\n", tools_section(self.wording, _TOOLS, tools, WORDING_FILE)]
        last = last_turn(messages)
        for place, message in enumerate(messages):
            is_open = is_thinking and place >= last
            role = message["role"]
            if role == "system":
                parts.append(content_of(message))
            elif role in ("user", "developer"):
                text = content_of(message) if role == "user" else self._developer(message)
                parts += [USER, text, ASSISTANT, THINK if is_open else END_THINK]
            elif role == "tool":
                parts += _result(messages, place, is_open)
            else:
                parts += _answer(message, is_open)
        return MarkedText.join(parts)

    def _developer(self, message: Message) -> MarkedText:
        """A developer's turn in the words of the model's encoder."""
        inner = () if self.wording is None else self.wording.inner
        frames = [text for text in inner if text.startswith("\n\n# ") and text.endswith("{}")]
        if len(frames) != 1 or not content_of(message).text:
            raise TemplateFault(
                "a developer message needs a text, and the wording around it, which stands in "
                f"encoding/{WORDING_FILE} of the model"
            )
        return MarkedText.join([frames[0].removesuffix("{}"), content_of(message)])


def _answer(message: Message, is_open: bool) -> list[Part]:
    """An earlier answer; its reasoning only behind the last turn."""
    calls, reasoning = calls_of(message), reasoning_of(message)
    parts: list[Part] = []
    if is_open:
        if reasoning is None and not calls:
            raise TemplateFault(
                "an assistant message behind the last turn needs reasoning or tool calls"
            )
        parts += [reasoning or "", END_THINK]
    parts.append(content_of(message))
    if calls:
        parts += ["\n\n", *calls_block(BLOCK, calls)]
    return [*parts, EOS]


def _result(messages: Sequence[Message], place: int, is_open: bool) -> list[Part]:
    """One result of a call; the first and the last of a group open and close its frame."""
    first = place
    while first > 0 and messages[first - 1]["role"] == "tool":
        first -= 1
    asked = messages[first - 1] if first > 0 else None
    calls = calls_of(asked) if asked is not None and asked["role"] == "assistant" else []
    stop = place + 1
    while stop < len(messages) and messages[stop]["role"] == "tool":
        stop += 1
    if stop - first != len(calls):
        raise TemplateFault(f"{stop - first} tool messages follow {len(calls)} tool calls")
    given, wanted = messages[place].get("tool_call_id"), calls[place - first]["id"]
    if given is not None and wanted is not None and _text(given) != wanted:
        raise TemplateFault("tool messages must come in the order of the tool calls")
    parts: list[Part] = ["\n\n<function_results>"] if place == first else []
    parts += ["\n<result>", content_of(messages[place]), "</result>"]
    if place == stop - 1:
        parts += ["\n</function_results>\n\n", THINK if is_open else END_THINK]
    return parts


def _text(value: object) -> object:
    return value.text if isinstance(value, MarkedText) else value
