"""The manifest: what made the rows of an output folder, and whether a run may go on with it."""

import hashlib
import importlib.metadata
import json
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchmla import __version__
from batchmla.errors import JobError
from batchmla.jobs.store import Store

FORMAT = 1

# Fields and sections that do not change what a row becomes. A model's and an input's path are
# covered by their fingerprints, which follow the bytes and not the place.
_FREE = (
    "name", "model.path", "model.revision", "model.memory_utilization", "model.parallel",
    "input.path", "input.format", "input.check", "engine.max_num_seqs", "engine.max_batched_tokens",
    "engine.prefix_caching", "engine.block_size", "engine.order", "engine.window_rows",
    "engine.dedupe", "executor", "output.path", "output.compression", "errors",
)  # fmt: skip
_FIXED = (
    "output.rows_per_file",
    "output.format",
    "sampling.n",
    "sampling.n.column",
)  # for an output, whatever is wished

HasGrown = Callable[[str, str, str | None], bool]

_PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow", "numpy", "jinja2")
_BESIDE_NUMBERS = ("python", "pyarrow")  # versions that no token id depends on
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
_TEXTS = ("versions", "model", "input", "numerics")  # maps from text to text
_SHAPES: dict[str, Any] = {  # of the entries that are no map
    "job_id": str, "created_s": int | float, "columns": list, "prompt": str,
    "num_rows": int | None, "last_rows": str | None, "format": int, "earlier": list,
}  # fmt: skip
_SINGLE = "model.safetensors"
_SAMPLE_BYTES = 65536
_LISTED_FILES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The record of one job. `job` maps each dotted field to its value and where it came from."""

    job_id: str
    created_s: float
    job: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    model: Mapping[str, str]  # file → hash
    input: Mapping[str, str]  # file → place, size and digest
    columns: Sequence[str]  # of the output: name and type
    prompt: str  # hash of templates, markers and tool definitions
    numerics: Mapping[str, str] = field(default_factory=dict)  # device, threads, dtype …
    num_rows: int | None = None  # once the input has been read to its end
    last_rows: str | None = None  # of the last input file: number of rows and digest
    format: int = FORMAT
    earlier: Sequence[Mapping[str, Any]] = field(default=())  # before --accept-changes


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted field, value)."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def make_manifest(
    settings: Mapping[str, Any],
    sources: Mapping[str, str],
    *,
    model: Mapping[str, str],
    input_fingerprint: Mapping[str, str],
    prompt: str,
    columns: pa.Schema,
    numerics: Mapping[str, str],
    last_rows: str | None = None,
) -> Manifest:
    """A new job's manifest. `settings` is the job file as resolved, nested; `sources` by field."""
    job = {
        name: {"value": value, "source": _source(name, sources)}
        for name, value in flatten(settings)
    }
    return Manifest(
        job_id=secrets.token_hex(8),
        created_s=time.time(),
        job=plain(job),
        versions=versions(),
        model=dict(model),
        input=dict(input_fingerprint),
        columns=[f"{field.name}: {field.type}" for field in columns],
        prompt=prompt,
        numerics=dict(numerics),
        last_rows=last_rows,
    )


@cache
def versions() -> Mapping[str, str]:
    """Of what can change the numbers: Python and the packages that compute."""
    found = {"batchmla": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def manifest_path(output: Path) -> Path:
    return output / "_batchmla" / "manifest.json"


def read_manifest(output: Path) -> Manifest | None:
    """The manifest of `output`, or None when it has none."""
    path = manifest_path(output)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise JobError(f"{output} is no folder; give a job's output.path") from error
    except OSError as error:
        reason = "it is a folder" if path.is_dir() else error.strerror or "no reason given"
        raise JobError(_unreadable(path, reason)) from error
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise JobError(
            _unreadable(path, "it is empty" if not data else "it is not JSON")
        ) from error
    fault = _fault_of(raw)
    if fault is not None:
        raise JobError(_unreadable(path, fault))
    return Manifest(**raw)


def _unreadable(path: Path, reason: str) -> str:
    return (
        f"{path} cannot be read: {reason}; restore it from a copy, start over with run --fresh, or "
        f"choose another output.path"
    )


def _fault_of(raw: Any) -> str | None:
    """What is wrong with a manifest's text, or None."""
    if not isinstance(raw, dict):
        return "it holds no JSON object"
    if raw.get("format") != FORMAT:
        if "format" not in raw:
            return "it has no format number, so it is damaged or not a manifest"
        return f"its format is {json.dumps(raw['format']):.40}, and this version reads {FORMAT}"
    known = {each.name: each for each in fields(Manifest)}
    for name, each in known.items():
        is_optional = each.default is not MISSING or each.default_factory is not MISSING
        if name not in raw and not is_optional:
            return f"its entry {name} is missing"
        if name in raw and not isinstance(raw[name], _SHAPES.get(name, dict)):
            return f"its entry {name} is damaged"
    extra = sorted(set(raw) - set(known))
    if extra:
        return f"its entry {extra[0]} is not known to this version"
    if not all(isinstance(value, dict) for value in raw["job"].values()):
        return "its entry job is damaged"
    texts = [text for name in _TEXTS for text in raw.get(name, {}).values()] + raw["columns"]
    return None if all(isinstance(text, str) for text in texts) else "it holds damaged entries"


def write_manifest(store: Store, manifest: Manifest) -> None:
    store.write(manifest_path(store.root), json.dumps(asdict(manifest), indent=1).encode())


def differences(old: Manifest, new: Manifest) -> list[str]:
    """What changes rows and is not the same, one "field: old → new" each."""
    found = []
    for name in sorted(set(old.job) | set(new.job)):
        before, after = (each.job.get(name, {}).get("value") for each in (old, new))
        if before != after and not _is_free(name):
            found.append(f"{name}: {json.dumps(before)} → {json.dumps(after)}")
    for name in sorted(set(old.model) | set(new.model)):
        if old.model.get(name) != new.model.get(name):
            before, after = (each.model.get(name, "none") for each in (old, new))
            found.append(f"model file {name}: {before} → {after}")
    if old.prompt != new.prompt:
        found.append(
            f"the rendered prompt (template, tokenizer files, tools or markers): hash {old.prompt} "
            f"→ {new.prompt}"
        )
    return found + _numeric_changes(old, new) + _input_changes(old.input, new.input)


def _numeric_changes(old: Manifest, new: Manifest) -> list[str]:
    """What the same bits depend on, where the job asks for them."""
    if not new.job.get("engine.deterministic", {}).get("value"):
        return []
    before, after = ({**each.versions, **each.numerics} for each in (old, new))
    return [
        f"{name} (engine.deterministic): {before.get(name, 'none')} → {after.get(name, 'none')}"
        for name in sorted(set(before) | set(after))
        if before.get(name) != after.get(name) and name not in _BESIDE_NUMBERS
    ]


def _input_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Changed files. Files added after the old ones are none: rows keep their indices."""
    found = [
        f"input file {name}: {was} → {new.get(name, 'gone')}"
        for name, was in old.items()
        if new.get(name) != was
    ]
    more = [f"and {len(found) - _LISTED_FILES} more input files"]
    return found[:_LISTED_FILES] + (more if len(found) > _LISTED_FILES else [])


def _moved_files(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Old files whose change moves the rows of others: all but the last one, and its place."""
    moved = [name for name in list(old)[:-1] if new.get(name) != old[name]]
    moved += [name for name in list(old)[-1:] if _place(new.get(name)) != _place(old[name])]
    return moved


def _place(described: str | None) -> str | None:
    return None if described is None else described.partition(",")[0]


def _with_growth(old: Manifest, new: Manifest, has_grown: HasGrown) -> Manifest:
    """`old` with the last file as it is now, if that is what it was and more rows."""
    last = next(reversed(list(old.input)), "")
    if last not in new.input or not has_grown(last, old.input[last], old.last_rows):
        return old
    return replace(old, input={**old.input, last: new.input[last]}, num_rows=None)


def settle(
    old: Manifest | None,
    new: Manifest,
    *,
    output: Path,
    is_accepted: bool,
    has_grown: HasGrown = lambda name, was, was_rows: False,
) -> tuple[Manifest, bool]:
    """The manifest to go on with, and whether it differs from the one on the disk.

    `has_grown` says whether an input file is what it was (in words of its fingerprint, and its rows
    as `last_rows` told) with rows added at its end: those are picked up like files that follow.
    """
    if old is None:
        return new, True
    for name in _FIXED:
        before, after = (each.job.get(name, {}).get("value") for each in (old, new))
        if before != after:
            raise JobError(
                f"{output} was begun with {name} {before}, not {after}; that is fixed for an "
                f"output: set it back, start over with --fresh, or choose another output.path"
            )
    if old.columns != new.columns:
        changed = sorted(set(old.columns) ^ set(new.columns)) or ["their order"]
        raise JobError(
            f"{output} was begun with other columns (differing: {'; '.join(changed)}); a data set "
            f"has one schema: start over with --fresh, or choose another output.path"
        )
    was, old = old, _with_growth(old, new, has_grown)
    changed = differences(old, new)
    num_rows = old.num_rows if old.input == new.input else None
    if not changed:
        kept = replace(new, job_id=old.job_id, created_s=old.created_s, earlier=old.earlier)
        kept = replace(kept, num_rows=num_rows)
        return kept, plain(asdict(kept)) != plain(asdict(was))
    moved = _moved_files(old.input, new.input)
    if moved:
        raise JobError(
            f"{output}: input file {moved[0]} was changed, moved or taken away; finished rows are "
            f"known by their place in the input, so only the last file may change and files may "
            f"follow: start over with --fresh, or choose another output.path"
        )
    if not is_accepted:
        listed = "\n  ".join(changed)
        raise JobError(
            f"{output} was begun with another job:\n  {listed}\ngo on anyway with --accept-changes "
            f"(finished rows are kept), start over with --fresh, or choose another output.path"
        )
    record = {key: value for key, value in asdict(was).items() if key != "earlier"}
    earlier = (*old.earlier, record)
    return replace(new, job_id=old.job_id, earlier=earlier, num_rows=num_rows), True


def model_fingerprint(folder: Path) -> dict[str, str]:
    """File → hash: small files whole; weights by size and three samples of 64 KiB."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in _WEIGHTS + _SMALL or (path.is_dir() and path.name != _SINGLE):
            continue
        try:
            if path.suffix in _WEIGHTS:
                found[path.name] = _sampled_hash(path)
            else:
                found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except IsADirectoryError as error:
            raise JobError(
                f"{path} is a folder where a file should be; download the model again"
            ) from error
        except OSError as error:
            raise JobError(
                f"the model's file {path} cannot be read ({error.strerror}); make it readable, or "
                f"download the model again"
            ) from error
    return found


def _sampled_hash(path: Path) -> str:
    num_bytes = path.stat().st_size
    digest = hashlib.sha256(str(num_bytes).encode())
    with path.open("rb") as file:
        for offset in (0, num_bytes // 2, max(0, num_bytes - _SAMPLE_BYTES)):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(free + ".") for free in _FREE)


def _source(name: str, sources: Mapping[str, str]) -> str:
    """Of the field itself or of the nearest section above it that has one."""
    while name:
        if name in sources:
            return sources[name]
        name = name.rpartition(".")[0]
    return "default"


def plain(value: Any) -> Any:
    """As it will be after a round trip through JSON, so that comparing is exact."""
    return json.loads(json.dumps(value))
