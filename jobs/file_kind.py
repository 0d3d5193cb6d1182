"""What kind of data a file holds: by its name, checked by its first bytes."""

import codecs
import os
from pathlib import Path

from batchmla.errors import JobError
from batchmla.jobs.input_file import Compression, Format, InputFile
from batchmla.jobs.remote import ObjectFacts, RemotePath
from batchmla.jobs.remote_input import reading

_PACKED = ("", ".gz", ".zst")
_JSONL_ENDINGS = tuple(name + packed for name in (".jsonl", ".ndjson") for packed in _PACKED)
_CSV_ENDINGS = tuple(".csv" + packed for packed in _PACKED)
_UNREAD_ENDINGS = (".tsv", ".json", ".arrow", ".feather", ".orc", ".xlsx")
KIND_WORDS: dict[str, str] = {
    "parquet": "Parquet",
    "jsonl": "JSONL",
    "csv": "CSV",
    "openai_batch": "OpenAI batch",
    "arrow": "a saved dataset",
}
_MAGIC = (
    (b"PAR1", "Parquet"),
    (b"PARE", "encrypted Parquet"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"\x89PNG", "a PNG image"),
    (b"%PDF", "PDF"),
    (b"ARROW1", "an Arrow file"),
    (b"ORC", "ORC"),
)


def format_by_name(name: str) -> Format | None:
    """The format a file's ending stands for, if any."""
    lower = name.lower()
    if lower.endswith(".parquet"):
        return "parquet"
    if lower.endswith(_JSONL_ENDINGS):
        return "jsonl"
    return "csv" if lower.endswith(_CSV_ENDINGS) else None


def is_wanted(name: str, wanted: str) -> bool:
    """Whether a file of a folder is data of the kind `wanted` (input.format)."""
    kind = format_by_name(name)
    if kind is None or name.startswith((".", "_")):
        return False
    return wanted == "auto" or kind == ("jsonl" if wanted == "openai_batch" else wanted)


def kind_words(wanted: str) -> str:
    """The kinds of file that input.format allows, for messages."""
    return KIND_WORDS.get(wanted, "Parquet, JSONL or CSV")


def checked_file(path: str, root: str, wanted: str) -> InputFile:
    """The file's facts, or a JobError if it cannot be read or is not what its name says."""
    try:
        status = os.stat(path)
        if not os.path.isfile(path):
            raise JobError(f"input file {path} is not a regular file")
        with open(path, "rb") as stream:
            head = stream.read(1024)
            stream.seek(max(status.st_size - 4, 0))
            tail = stream.read(4)
    except OSError as fault:
        raise JobError(f"input file {path} cannot be read: {fault.strerror}") from None
    kind, compression = _kind_of(path, wanted, head, tail)
    return InputFile(
        path=path,
        name=Path(os.path.relpath(os.path.abspath(path), root)).as_posix(),
        format=kind,
        compression=compression,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def checked_object(facts: ObjectFacts, name: str, wanted: str) -> InputFile:
    """The same of an object in a store, which is called `name`; its end is not looked at."""
    with reading(facts.url), RemotePath(facts.url).open("rb", buffering=1024) as stream:
        head = stream.read(1024)
    kind, compression = _kind_of(facts.url, wanted, head, None)
    return InputFile(
        path=facts.url,
        name=name,
        format=kind,
        compression=compression,
        size_bytes=facts.num_bytes,
        mtime_ns=facts.mtime_ns,
        tag=facts.tag,
    )


def _kind_of(path: str, wanted: str, head: bytes, tail: bytes | None) -> tuple[Format, Compression]:
    """By the name, checked by the first bytes and, where they are given, the last ones."""
    kind = _format_of(path, wanted, head)
    if kind == "parquet":
        _check_parquet(path, head, tail)
    is_text = kind not in ("parquet", "arrow")
    return kind, _check_text(path, head, kind) if is_text else "none"


def _format_of(path: str, wanted: str, head: bytes) -> Format:
    given: dict[str, Format] = {
        "parquet": "parquet",
        "jsonl": "jsonl",
        "csv": "csv",
        "openai_batch": "openai_batch",
        "dataset": "arrow",
    }
    if wanted in given:
        return given[wanted]
    by_name = format_by_name(os.path.basename(path))
    if by_name is not None:
        return by_name
    if head.startswith(b"PAR1"):
        return "parquet"
    ending = next((end for end in _UNREAD_ENDINGS if path.lower().endswith(end)), None)
    if ending is None:
        raise JobError(f"input file {path}: its ending tells no format; set input.format")
    hint = {
        ".json": ", or set input.format: jsonl if each line is an object",
        ".arrow": ", or the folder that save_to_disk wrote",
    }.get(ending, "")
    raise JobError(
        f"input file {path}: {ending} files are not read; give Parquet, JSONL or CSV{hint}"
    )


def _content(head: bytes) -> str:
    if not head:
        return "nothing"
    for magic, words in _MAGIC:
        if head.startswith(magic):
            return words
    return "binary data" if b"\0" in head and not _is_text(head) else "text"


def _is_text(head: bytes) -> bool:
    """Whether bytes with NULs among them are UTF-8 nonetheless, and not every other one is NUL."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # it may be cut within a character
    except UnicodeDecodeError:
        return False
    return head.count(b"\0") * 4 <= len(head)


def _check_parquet(path: str, head: bytes, tail: bytes | None) -> None:
    if not head.startswith(b"PAR1"):
        raise JobError(
            f"input file {path} is not Parquet: it holds {_content(head)}; "
            "name it by what it holds or set input.format"
        )
    if tail not in (b"PAR1", None):
        raise JobError(f"input file {path} is cut short: it has no Parquet footer; write it again")


def _check_text(path: str, head: bytes, kind: Format) -> Compression:
    content = _content(head)
    claims: tuple[tuple[str, Compression], ...] = ((".gz", "gzip"), (".zst", "zstd"))
    for ending, compression in claims:
        if path.lower().endswith(ending) and content != compression:
            raise JobError(
                f"input file {path} is not {compression} data: it holds {content}; "
                "write it again or name it by what it holds"
            )
    if content == "gzip":
        return "gzip"
    if content == "zstd":
        return "zstd"
    if content not in ("text", "nothing"):
        form = (
            "UTF-8 text with a line of column names"
            if kind == "csv"
            else ("UTF-8 text with one JSON object a line")
        )
        raise JobError(
            f"input file {path} is not {KIND_WORDS[kind]}: it holds {content}; "
            f"give {form}, or set input.format"
        )
    return "none"
