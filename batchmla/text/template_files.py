"""Where a model's folder keeps its chat templates, and which of several is meant."""

import json
from collections.abc import Mapping
from pathlib import Path

from batchmla.errors import JobError
from batchmla.text.tokenizer import Tokenizer

Found = tuple[str, str]  # source, where it stands

DEFAULT = "default"
WITH_TOOLS = "tool_use"  # the name that transformers prefers where tools are given
MORE_FOLDER = "additional_chat_templates"


def templates_in(folder: str | Path, tokenizer: Tokenizer) -> dict[str, Found]:
    """The templates of a model's folder by name; the one without a name is the default."""
    folder = Path(folder)
    more = {
        file.stem: (read_template(file), str(file))
        for file in sorted((folder / MORE_FOLDER).glob("*.jinja"))
    }
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {**more, DEFAULT: (read_template(file), str(file))}
    in_config = tokenizer.config.get("chat_template")
    file = folder / "tokenizer_config.json"
    if in_config is None and (folder / "chat_template.json").is_file():
        file = folder / "chat_template.json"
        try:
            in_config = json.loads(read_template(file)).get("chat_template")
        except (ValueError, AttributeError):
            raise JobError(f"{file} holds no chat template") from None
    if in_config is None:
        return more
    if isinstance(in_config, str):
        return {**more, DEFAULT: (in_config, str(file))}
    named = {
        str(entry.get("name")): entry.get("template")
        for entry in (in_config if isinstance(in_config, list) else ())
        if isinstance(entry, Mapping)
    }
    if not named:
        raise JobError(f"{file}: its chat_template is neither a text nor a list of named templates")
    texts = {name: text for name, text in named.items() if isinstance(text, str)}
    return {**more, **{name: (text, f"{file} ({name})") for name, text in texts.items()}}


def find_template(
    folder: str | Path,
    tokenizer: Tokenizer,
    *,
    has_tools: bool = False,
    asked: str | Path | None = None,
) -> Found | None:
    """A model folder's chat template and where it stands, or None.

    Of named templates the default, or the one for tools where a job has tools. `asked` is what
    prompt.chat_template says: a file in the place of the model's own, or one of its names.
    """
    if asked is not None:
        return _asked(folder, tokenizer, asked)
    named = templates_in(folder, tokenizer)
    for name in (WITH_TOOLS, DEFAULT) if has_tools else (DEFAULT,):
        if name in named:
            return named[name]
    if named:
        raise JobError(
            f"{folder}: its chat templates ({', '.join(sorted(named))}) hold no 'default'; give "
            "the name of the one to use as prompt.chat_template"
        )
    return None


def _asked(folder: str | Path, tokenizer: Tokenizer, asked: str | Path) -> Found:
    if Path(asked).is_file():
        return read_template(Path(asked)), str(asked)
    named = templates_in(folder, tokenizer)
    if str(asked) in named:
        return named[str(asked)]
    names = ", ".join(sorted(named))
    known = f"; the model's own templates are {names}" if len(named) > 1 else ""
    raise JobError(f"prompt.chat_template: {asked} does not exist{known}")


def read_template(file: Path) -> str:
    """A template file's text. Raises JobError."""
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as fault:
        raise JobError(f"prompt.chat_template: {file} cannot be read: {fault}") from None
