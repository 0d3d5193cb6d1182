"""`batchmla preview`: the first prompts exactly as the model will get them. Loads no weights."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from batchmla.core import Prompt
from batchmla.jobs.local import LocalText, local_text
from batchmla.jobs.read import open_job_input
from batchmla.jobs.row import Row
from batchmla.jobs.spec import LoadedSpec
from batchmla.text.reasoning import Reasoner
from batchmla.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A control token, or a run of text tokens, with its ids."""

    text: str
    token_ids: tuple[int, ...]
    is_control: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPreview:
    """One row's prompt; with an `error` there is none."""

    index: int
    row_id: str
    error: str | None = None
    pieces: tuple[Piece, ...] = ()
    is_reasoning_open: bool = False  # the prompt ends inside the thinking markers

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for piece in self.pieces for token_id in piece.token_ids]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The first prompts of a job and the settings that go with all of them."""

    job: str
    settings: Mapping[str, Any]  # by the names of the job file, each with its source
    prompts: tuple[PromptPreview, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        prompts = [
            asdict(prompt)
            | {"text": prompt.text, "token_ids": prompt.token_ids}
            | {"prompt_tokens": prompt.prompt_tokens}
            for prompt in self.prompts
        ]
        return {"job": self.job, "settings": dict(self.settings), "prompts": prompts}


def preview(loaded: LoadedSpec, num_rows: int = 3) -> Preview:
    """Renders the prompts of the first `num_rows` rows."""
    spec = loaded.spec
    table = open_job_input(spec)
    table.scan("auto", limit_s=0.0)  # no further than the columns need
    text = local_text(spec, table)
    rows = [row for batch in table.rows(0, num_rows, text.columns) for row in batch]
    return Preview(job=spec.name, settings=text.effective, prompts=preview_rows(text, rows))


def preview_rows(text: LocalText, rows: Sequence[Row]) -> tuple[PromptPreview, ...]:
    """The prompts of these rows."""
    made = zip(rows, text.prompts(rows), strict=True)
    return tuple(_shown(row, one, text.tokenizer, text.reasoner) for row, one in made)


def _shown(row: Row, made: Prompt | str, tokenizer: Tokenizer, reasoner: Reasoner) -> PromptPreview:
    if isinstance(made, str):
        return PromptPreview(index=row.index, row_id=row.id, error=made)
    return PromptPreview(
        index=row.index,
        row_id=row.id,
        pieces=_pieces(made, tokenizer),
        is_reasoning_open=reasoner.is_open(made.token_ids),
    )


def _pieces(prompt: Prompt, tokenizer: Tokenizer) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    run: list[int] = []
    flags = tokenizer.is_control(prompt.token_ids).tolist()
    for token_id, is_control in zip(prompt.token_ids.tolist(), flags, strict=True):
        if not is_control:
            run.append(token_id)
            continue
        pieces += _text_piece(run, tokenizer)
        run = []
        name = tokenizer.decode([token_id]).text
        pieces.append(Piece(text=name, token_ids=(token_id,), is_control=True))
    return (*pieces, *_text_piece(run, tokenizer))


def _text_piece(ids: Sequence[int], tokenizer: Tokenizer) -> list[Piece]:
    if not ids:
        return []
    return [Piece(text=tokenizer.decode(ids).text, token_ids=tuple(ids), is_control=False)]


def print_preview(made: Preview, console: Console | None = None) -> None:
    """Prompts with control tokens in ⟦ ⟧, their ids, and the sampling values in force."""
    console = console or Console(soft_wrap=True, highlight=False)
    for prompt in made.prompts:
        title = f"row {prompt.index}  id {prompt.row_id}"
        if prompt.error is not None:
            console.print(Text(f"{title}  error: {_visible(prompt.error)}", style="red"))
            console.print()
            continue
        opened = "  ends inside the reasoning" if prompt.is_reasoning_open else ""
        console.print(Text(f"{title}  {prompt.prompt_tokens} tokens{opened}", style="bold"))
        body = Text()
        for piece in prompt.pieces:
            shown = _visible(piece.text)
            if piece.is_control:
                body.append(f"⟦{shown}⟧", style="bold magenta")
            else:
                body.append(shown)
        console.print(body)
        console.print(Text(f"ids {' '.join(map(str, prompt.token_ids))}", style="dim"))
        console.print()
    for name, value in made.settings.items():
        console.print(Text(f"{name}: {_setting(value)}", style="dim"))


def _setting(value: Any) -> str:
    if isinstance(value, Mapping) and {"value", "source"} <= set(value):
        return f"{value['value']} ({value['source']})"
    return str(value)


def _visible(text: str) -> str:
    """Control characters spelled out, so that a row cannot steer the terminal."""
    return "".join(
        c if c in "\n\t" or (c.isprintable() or ord(c) > 0x9F) else f"\\x{ord(c):02x}" for c in text
    )
