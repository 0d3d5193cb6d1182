"""What a chat format says about a model's input and output."""

from dataclasses import dataclass
from typing import Literal

from batchmla.text.formats.calls import ToolSyntax

ArgumentsForm = Literal["as_given", "text", "object"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The markers around the reasoning, both None for a format without reasoning; tool calls.

    `tools` is None where the format has no syntax for calls. `arguments` is the form in which the
    family's chat template takes the arguments of earlier calls: JSON text or an object.
    """

    name: str
    start: str | None
    end: str | None
    tools: ToolSyntax | None = None
    arguments: ArgumentsForm = "as_given"
