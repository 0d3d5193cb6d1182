"""The tokenizer files of a model folder, brought to the state transformers would bring them to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from batchmla.errors import JobError
from batchmla.text.control import AddedToken

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


_LFS_POINTER = b"version https://git-lfs"


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} without the file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as fault:
        raise unreadable(file, f"is not JSON: {fault}") from None
    if not isinstance(content, dict):
        raise JobError(f"{file} must hold a JSON object")
    return content


def unreadable(file: Path, reason: str) -> JobError:
    """The error of a file that `reason` makes useless, or that only points to the real one."""
    with file.open("rb") as content:
        if content.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return JobError(
                f"{file} is a git-LFS pointer, not the file itself; run git lfs pull in that folder"
            )
    return JobError(f"{file} {reason}")


def converted(folder: Path) -> tokenizers.Tokenizer:
    """A tokenizer made from an older format than tokenizer.json."""
    older = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")
    if not any((folder / name).is_file() for name in older):
        raise JobError(f"{folder} has no tokenizer.json; copy the model's tokenizer files there")
    from transformers import AutoTokenizer  # seconds to import, and needed here only

    try:
        made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return tokenizers.Tokenizer.from_str(made.backend_tokenizer.to_str())
    except Exception as fault:  # whatever a foreign format raises
        code = read_json(folder / "tokenizer_config.json").get("auto_map")
        if code:
            raise JobError(
                f"{folder} has no tokenizer.json, and the code of its tokenizer (auto_map: "
                f"{json.dumps(code)}) is never run; put a tokenizer.json made with it there"
            ) from None
        raise JobError(
            f"{folder} has no tokenizer.json and its tokenizer cannot be converted: {fault}"
        ) from None


def _content(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens by name (bos_token, …), as chat templates use them."""
    named = {name: _content(config.get(name)) for name in _NAMED}
    return {name: content for name, content in named.items() if content is not None}


def add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Tokens that only tokenizer_config.json names, in transformers' order."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    by_id: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    entries = [by_id[key] for key in sorted(by_id, key=int)]
    entries += list(special.values())
    entries += list(config.get("additional_special_tokens") or ())
    for entry in entries:
        content = _content(entry)
        if content is None or content in known:
            continue
        known.add(content)
        flags = entry if isinstance(entry, Mapping) else {"special": True, "normalized": False}
        is_special = bool(flags.get("special", False)) or content in special.values()
        token = tokenizers.AddedToken(
            content,
            lstrip=bool(flags.get("lstrip", False)),
            rstrip=bool(flags.get("rstrip", False)),
            single_word=bool(flags.get("single_word", False)),
            normalized=bool(flags.get("normalized", not is_special)),
            special=is_special,
        )
        (backend.add_special_tokens if is_special else backend.add_tokens)([token])


def added_tokens(backend: tokenizers.Tokenizer) -> list[AddedToken]:
    """The added vocabulary."""
    return [_added(i, token) for i, token in backend.get_added_tokens_decoder().items()]


def _added(token_id: int, token: tokenizers.AddedToken) -> AddedToken:
    return AddedToken(
        token_id=int(token_id),
        content=str(token.content),
        special=bool(token.special),
        lstrip=bool(token.lstrip),
        rstrip=bool(token.rstrip),
        single_word=bool(token.single_word),
        normalized=bool(token.normalized),
    )
