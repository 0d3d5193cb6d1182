"""A job file becomes a `JobSpec`: strict, with overrides, every fault of a file in one message.

The shape is `settings.py`; this file reads, merges, checks and says where each value came from.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from batchmla.errors import JobError
from batchmla.jobs.settings import ExecutorSettings, JobSpec
from batchmla.jobs.unbuilt import unbuilt_faults
from batchmla.jobs.wording import known_keys, nearest, unknown_keys, value_faults
from batchmla.jobs.yaml_text import KeyPath, key_word, parse_yaml

Source = Literal["file", "set", "default"]

__all__ = ["JobSpec", "LoadedSpec", "Source", "apply_override", "build_spec", "load_spec"]


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A checked job, and for every value (by dotted path) what gave it: file, --set, a default."""

    spec: JobSpec
    sources: Mapping[str, Source]
    path: Path | None = None  # of the job file

    def resolved(self) -> dict[str, Any]:
        """The job as plain JSON values, for a manifest."""
        return self.spec.model_dump(mode="json")


def load_spec(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoadedSpec:
    """Read and check a job file; `overrides` are "a.b=c" with c parsed like the file's values."""
    file = Path(path)
    parsed = parse_yaml(_read_text(file), str(file))
    if parsed.value is not None and not isinstance(parsed.value, dict):
        raise JobError(f"{file}: a job file is a map of sections such as model: and input:")
    given: dict[Any, Any] = parsed.value or {}
    merged = deepcopy(given)
    set_paths = [apply_override(merged, text) for text in overrides]
    spec = _checked(merged, str(file), parsed.lines, set_paths, file.stem)
    return LoadedSpec(spec, MappingProxyType(_sources(spec, merged, set_paths)), file)


def build_spec(values: Mapping[str, Any], where: str = "job") -> LoadedSpec:
    """The same checks for a job given as nested maps, as a notebook does."""
    spec = _checked(deepcopy(dict(values)), where, {}, [], "job")
    return LoadedSpec(spec, MappingProxyType(_sources(spec, values, [])))


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = nearest(file.name, [p.name for p in file.parent.glob("*.y*ml")])
        hint = f"; did you mean {file.parent / near}?" if near else ""
        raise JobError(f"job file {file} does not exist{hint}") from None
    except IsADirectoryError:
        raise JobError(f"job file {file} is a folder; name the YAML file in it") from None
    except UnicodeDecodeError as fault:
        raise JobError(f"job file {file} is not UTF-8 text at byte {fault.start}") from None
    except OSError as fault:
        raise JobError(f"job file {file} cannot be read: {fault.strerror}") from None


def apply_override(merged: dict[Any, Any], text: str) -> KeyPath:
    """Puts the value of "a.b=c" into the nested maps; c is YAML. Returns where."""
    name, equals, value_text = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise JobError(f"--set {text}: write it as section.key=value")
    section = merged
    for key in path[:-1]:
        if not isinstance(section.get(key), dict):
            section[key] = {}
        section = section[key]
    section[path[-1]] = parse_yaml(value_text, f"--set {name}").value
    return path


def _checked(
    raw: dict[Any, Any],
    where: str,
    lines: Mapping[KeyPath, int],
    set_paths: Sequence[KeyPath],
    default_name: str,
) -> JobSpec:
    """The spec of `raw`, or one JobError with all its faults in the order of the file."""
    raw = {"name": default_name} | raw
    known = known_keys(JobSpec)
    for key in [key for key, value in raw.items() if value is None and (key,) in known]:
        if key != "name":
            del raw[key]  # a section whose lines are all commented out
    faults = unknown_keys(raw, known)
    _remove(raw, list(faults))
    unbuilt = dict(unbuilt_faults(raw))
    _remove(raw, list(unbuilt))
    faults |= unbuilt
    spec: JobSpec | None = None
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as fault:
        for path, sentence in value_faults(fault, known):
            if path not in faults and not any(p[: len(path)] == path for p in unbuilt):
                faults[path] = sentence
    if spec is not None:
        faults |= {path: text for path, text in broken_rules(spec) if path not in unbuilt}
    if faults or spec is None:
        raise JobError(_one_message(faults, where, lines, set_paths))
    return spec


def _remove(raw: dict[Any, Any], paths: list[KeyPath]) -> None:
    for *above, last in paths:
        section: Any = raw
        for key in above:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict):
            for key in [key for key in section if key_word(key) == last]:
                del section[key]


def _one_message(
    faults: Mapping[KeyPath, str],
    where: str,
    lines: Mapping[KeyPath, int],
    set_paths: Sequence[KeyPath],
) -> str:
    def line_of(path: KeyPath) -> int:
        found = [lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines]
        return found[0] if found else 0

    sentences: list[str] = []
    for path in sorted(faults, key=line_of):
        if any(path[: len(one)] == one for one in set_paths):
            place = "--set"
        elif line_of(path):
            place = f"{where}, line {line_of(path)}"
        else:
            place = where
        sentences.append(f"{place}: {faults[path]}")
    return "\n".join(sentences)


def _executor_faults(executor: ExecutorSettings) -> Iterator[tuple[KeyPath, str]]:
    fewest, most = executor.bounds
    if fewest > most:
        yield (
            ("executor", "replicas"),
            f"executor.replicas.min {fewest} is more than executor.replicas.max {most}",
        )
    if executor.kind == "local":
        for key, is_given in (("replicas", most > 1), ("address", executor.address != "auto")):
            if is_given:
                yield (
                    ("executor", key),
                    f"executor.{key} needs executor.kind: ray; local runs one engine here",
                )


def broken_rules(spec: JobSpec) -> Iterator[tuple[KeyPath, str]]:
    """What no single value shows: values that contradict one another."""
    prompt, sampling, reasoning = spec.prompt, spec.sampling, spec.reasoning
    given = [name for name in ("user", "messages", "raw") if getattr(prompt, name) is not None]
    is_batch = spec.input.format == "openai_batch"
    if is_batch and given:
        yield (
            ("prompt", given[0]),
            f"prompt.{given[0]}: the requests of an OpenAI batch hold the prompts; leave it out",
        )
    elif (is_batch or _may_be_batch(spec)) and not given:
        pass  # the input says whether it is one
    elif len(given) != 1:
        found = " and ".join(f"prompt.{name}" for name in given) or "none of them"
        yield (
            ("prompt",),
            f"give exactly one of prompt.user, prompt.messages and prompt.raw; found {found}",
        )
    elif prompt.system is not None and given != ["user"]:
        yield (
            ("prompt", "system"),
            f"prompt.system goes with prompt.user; put its text into prompt.{given[0]} instead",
        )
    yield from _format_faults(spec)
    if not spec.input.paths:
        yield ("input", "path"), "input.path is an empty list; name at least one file"
    for section, key, paths in (
        ("model", "path", (spec.model.path,)),
        ("input", "path", spec.input.paths),
        ("prompt", "chat_template", (prompt.chat_template,)),
        ("output", "path", (spec.output.path,)),
    ):
        if any(path is not None and (path == "" or "\0" in path) for path in paths):
            yield (
                (section, key),
                f"{section}.{key} must be a path: text that is not empty and holds no NUL",
            )
    most, least = sampling.max_tokens, sampling.min_tokens
    if isinstance(most, int) and isinstance(least, int) and least > most:
        yield (
            ("sampling", "min_tokens"),
            f"sampling.min_tokens {least} is more than sampling.max_tokens {most}",
        )
    if sampling.structured is not None and len(sampling.structured.given) != 1:
        found = " and ".join(sampling.structured.given) or "none of them"
        yield (
            ("sampling", "structured"),
            "sampling.structured must have exactly one of json_schema, regex, choice, grammar and "
            f"column; found {found}",
        )
    if (reasoning.start is None) != (reasoning.end is None):
        yield ("reasoning",), "reasoning.start and reasoning.end go together; give both or neither"
    if reasoning.budget is not None and reasoning.budget_share is not None:
        yield (
            ("reasoning", "budget_share"),
            "reasoning.budget and reasoning.budget_share are two ways to say one thing; give one",
        )
    yield from _executor_faults(spec.executor)
    has_budget = reasoning.budget is not None or reasoning.budget_share is not None
    ends_reasoning = has_budget or reasoning.loop_guard is not None
    if reasoning.budget_message is not None and not ends_reasoning:
        yield (
            ("reasoning", "budget_message"),
            "reasoning.budget_message needs reasoning.budget or reasoning.budget_share",
        )
    if has_budget and reasoning.parser == "none" and reasoning.end is None:
        yield (
            ("reasoning", "budget"),
            "a reasoning budget needs markers: with reasoning.parser none give reasoning.start "
            "and reasoning.end",
        )


def _format_faults(spec: JobSpec) -> Iterator[tuple[KeyPath, str]]:
    """What does not go with output.format."""
    output = spec.output
    if output.format == "parquet":
        return
    if "compression" in output.model_fields_set and output.compression != "none":
        yield (
            ("output", "compression"),
            f"output.compression is for Parquet, output.format {output.format} is plain text; "
            "leave it out",
        )
    if output.format == "openai_batch" and spec.input.columns is not None:
        yield (
            ("input", "columns"),
            "input.columns: output.format openai_batch carries no columns but the id; leave it out",
        )
    if output.format == "openai_batch" and spec.sampling.n != 1:
        yield (
            ("sampling", "n"),
            "sampling.n: several samples in output.format openai_batch are not built yet; choose "
            "parquet or jsonl",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if output.format == "openai_batch" and getattr(spec.sampling, name) is not None:
            yield (
                ("sampling", name),
                f"sampling.{name} in output.format openai_batch is not built yet; choose parquet "
                "or jsonl",
            )
    if output.format == "openai_batch" and output.prefix:
        yield (
            ("output", "prefix"),
            "output.prefix: output.format openai_batch has names of its own; leave it out",
        )


def _may_be_batch(spec: JobSpec) -> bool:
    """Whether the job leaves it to the input to be an OpenAI batch, whose rows are requests."""
    return spec.input.format == "auto" and "prompt" not in spec.model_fields_set


def _sources(
    spec: JobSpec, given: Mapping[Any, Any], set_paths: Sequence[KeyPath]
) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for path in _leaves(spec, ()):
        section: Any = given
        for key in path:
            section = section.get(key, _ABSENT) if isinstance(section, Mapping) else _ABSENT
        if section is _ABSENT:
            sources[".".join(path)] = "default"
        else:
            is_set = any(path[: len(one)] == one[: len(path)] for one in set_paths)
            sources[".".join(path)] = "set" if is_set else "file"
    return sources


def _leaves(section: BaseModel, above: KeyPath) -> Iterator[KeyPath]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name)


_ABSENT = object()
