"""What turns a conversation into a prompt's text: the model's chat template, or an encoder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from batchmla.errors import JobError
from batchmla.text.chat import ChatTemplate, Message, Thinking, Tools
from batchmla.text.encoded import EncodedChat, encoder_name
from batchmla.text.marked import MarkedText
from batchmla.text.template_files import templates_in
from batchmla.text.tokenizer import Tokenizer


class Renderer(Protocol):
    """Made once a job, before weights are loaded."""

    @property
    def source(self) -> str:
        """All that decides what a prompt is besides its conversation."""
        ...

    @property
    def template(self) -> str | None:
        """The chat template, None for an encoder."""
        ...

    @property
    def where(self) -> str:
        """Its name in messages."""
        ...

    @property
    def switches(self) -> tuple[str, ...]:
        """The names of its thinking switch, () without one."""
        ...

    def render(
        self, messages: Sequence[Message], *, tools: Tools = (), effort: str | None = None
    ) -> MarkedText:
        """The prompt of a conversation, ready for the next assistant turn.

        `tools` are this conversation's own, `effort` the level of reasoning that it asks for.
        Raises TemplateFault for a conversation that it refuses.
        """
        ...


def load_renderer(
    folder: str | Path,
    tokenizer: Tokenizer,
    *,
    model: Mapping[str, Any],
    thinking: Thinking = "auto",
    override: str | Path | None = None,
    tools: Tools = (),
    has_tools: bool = False,
) -> Renderer:
    """The renderer of a model folder, or `override` in its place, as prompt.chat_template says.

    `model`: the content of config.json. Raises JobError where the model ships neither a template
    nor conversations of a family that is known here.
    """
    is_given = override is not None or bool(templates_in(folder, tokenizer))
    if not is_given and encoder_name(model) is not None:
        return EncodedChat(
            Path(folder),
            tokenizer,
            model=model,
            thinking=thinking,
            tools=tools,
            has_tools=has_tools,
        )
    if not is_given:
        raise JobError(
            f"{folder} has no chat template; write the whole prompt with prompt.raw, or give a "
            "template file as prompt.chat_template"
        )
    return ChatTemplate.load(
        folder, tokenizer, thinking=thinking, override=override, tools=tools, has_tools=has_tools
    )


def has_renderer(folder: str | Path, tokenizer: Tokenizer, *, model: Mapping[str, Any]) -> bool:
    """Whether the model can be given conversations."""
    return encoder_name(model) is not None or bool(templates_in(folder, tokenizer))
