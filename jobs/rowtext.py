"""What the pipeline asks of a model's text side: rows to prompts, completions to columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchmla.core import Completion, Prompt
from batchmla.jobs.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion, split and decoded. Tool calls may change the engine's `finish_reason`."""

    reasoning: str | None
    content: str | None
    finish_reason: str
    reasoning_state: str
    reasoning_tokens: int
    content_tokens: int
    lossy: bool = False
    tool_calls: Sequence[Mapping[str, str]] | None = None
    tool_error: str | None = None


class RowText(Protocol):
    """Made once a run, before weights are loaded."""

    @property
    def prompt_hash(self) -> str:
        """Of everything besides the job's fields that decides what a row's prompt is."""
        ...

    @property
    def model_files(self) -> Mapping[str, str]:
        """File → hash of the model folder."""
        ...

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns that prompts are made of; None: any."""
        ...

    @property
    def effective(self) -> Mapping[str, Any]:
        """What the job's sampling and reasoning settings became, for the summary."""
        ...

    def prompts(self, rows: Sequence[Row]) -> Sequence[Prompt | str]:
        """One prompt a row, or the sentence why it has none."""
        ...

    def answer(self, prompt: Prompt, completion: Completion) -> Answer:
        """Splits a completion without error."""
        ...
