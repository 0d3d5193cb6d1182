"""Prompts of the models that ship no chat template, by an encoder of ours in its place."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from batchmla.errors import JobError
from batchmla.text.chat import Message, Thinking, Tools
from batchmla.text.formats.encode_v4 import EncoderV4
from batchmla.text.formats.encode_v32 import EncoderV32
from batchmla.text.formats.registry import model_names
from batchmla.text.formats.wording import Wording
from batchmla.text.marked import MarkedText
from batchmla.text.template import TemplateFault
from batchmla.text.tokenizer import Tokenizer


class Encoder(Protocol):
    """A family's rules for writing a conversation."""

    @property
    def default_thinking(self) -> bool:
        """Whether the model thinks where nobody says so."""
        ...

    @property
    def wording(self) -> Wording | None:
        """The fixed texts of the model's folder."""
        ...

    def encode(
        self, messages: Sequence[Message], tools: Tools, *, is_thinking: bool, effort: str | None
    ) -> MarkedText: ...


_ENCODERS: Mapping[str, tuple[str, Callable[[Path], Encoder]]] = {
    "deepseek_v32": ("deepseek_v32", EncoderV32),
    "DeepseekV32ForCausalLM": ("deepseek_v32", EncoderV32),
    "deepseek_v4": ("deepseek_v4", EncoderV4),
    "DeepseekV4ForCausalLM": ("deepseek_v4", EncoderV4),
}
_CONTROL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


def encoder_name(model: Mapping[str, Any]) -> str | None:
    """Which encoder of ours writes the prompts of a model without a template; None: none."""
    return next((_ENCODERS[name][0] for name in model_names(model) if name in _ENCODERS), None)


class EncodedChat:
    """An encoder with the thinking switch set, and the tools of all conversations."""

    switches = ("thinking",)
    template = None

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        model: Mapping[str, Any],
        thinking: Thinking = "auto",
        tools: Tools = (),
        has_tools: bool = False,
    ) -> None:
        """`model`: the content of config.json. Raises JobError where the prompts cannot be made."""
        found = next(_ENCODERS[name] for name in model_names(model) if name in _ENCODERS)
        self.where = f"the encoder of {found[0]}"
        missing = [token for token in _CONTROL if tokenizer.control_id(token) is None]
        if missing:
            raise JobError(
                f"{folder}: {self.where} needs the token {missing[0]}, which the model's "
                "vocabulary lacks; write the whole prompt with prompt.raw"
            )
        self._encoder = found[1](folder)
        is_default = self._encoder.default_thinking
        self.is_thinking = is_default if thinking == "auto" else thinking == "on"
        self._tools = tools
        if tools or has_tools:
            probe: Tools = tools or [{"type": "function", "function": {"name": "f"}}]
            try:
                self.render([{"role": "user", "content": MarkedText("")}], tools=probe)
            except TemplateFault as fault:
                raise JobError(f"prompt.tools: {folder}: {fault}") from None
        wording = self._encoder.wording
        self.source = f"{found[0]}, thinking {self.is_thinking}\n" + (
            "" if wording is None else wording.source
        )

    def render(
        self, messages: Sequence[Message], *, tools: Tools = (), effort: str | None = None
    ) -> MarkedText:
        """The prompt of a conversation, ready for the next assistant turn. Raises TemplateFault."""
        is_thinking = self.is_thinking and effort != "none"
        level = None if effort == "none" else effort
        return self._encoder.encode(
            messages, tools or self._tools, is_thinking=is_thinking, effort=level
        )
