"""The sampling values of a job: its own, else generation_config.json's, else neutral ones.

Every value is kept with its source, for the plan and the manifest. Values of rows come on top.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchmla.core import SamplingParams
from batchmla.errors import JobError
from batchmla.jobs.sampling_rules import RuleMaker
from batchmla.jobs.sampling_values import (
    JOB_FIELDS,
    MODEL_RULES,
    BadValue,
    make_params,
    read_value,
)
from batchmla.jobs.settings import ColumnRef, SamplingSettings, StructuredSettings
from batchmla.jobs.structured import without_nulls
from batchmla.weights.folder import refuse_pointer

Source = Literal["job", "generation_config", "default"]

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and where it came from."""

    value: Any
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`params` and `seed` of a row that brings no values of its own.

    `sources` has every value by its name in the job file, `columns` the input columns (by field)
    that rows bring their values in, `values` what goes for a row where they are null.
    """

    params: SamplingParams
    seed: int
    sources: Mapping[str, Sourced]
    columns: Mapping[str, str]
    values: Mapping[str, Any]
    eos_ids: frozenset[int]
    vocab_limit: int | None
    rules: RuleMaker | None
    structured_kind: str | None = None  # of the column's values; None: they say it themselves

    def of_row(self, given: Mapping[str, tuple[str, Any]]) -> tuple[SamplingParams, int]:
        """Parameters and seed with the values that a row brings: field → (who gives it, value).

        Null and NaN count as not given. Raises BadValue.
        """
        own = {
            name: read_value(name, where, value, self.vocab_limit)
            for name, (where, value) in given.items()
            if value is not None and value == value
        }
        if not own:
            return self.params, self.seed
        values = {**self.values, **own}
        return make_params(values, self.eos_ids, self.vocab_limit, self.rules), values["seed"]

    def from_columns(self, row: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        """What a row's columns give, for `of_row`."""
        given = {
            name: (f"sampling.{name} from column {column!r}", row.get(column))
            for name, column in self.columns.items()
        }
        where, value = given.get("structured", ("", None))
        if value is not None:
            value, kind = without_nulls(value), self.structured_kind
            if kind is not None:
                where = f"sampling.structured.{kind} from column {self.columns['structured']!r}"
                value = {kind: value}
            given["structured"] = (where, value)
        return given


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The content of a model folder's generation_config.json, {} without one."""
    file = Path(folder) / _FILE
    if not file.is_file():
        return {}
    data = file.read_bytes()
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as fault:
        refuse_pointer(file, data)
        raise JobError(f"{file} is not JSON: {fault}; copy it again from the model") from None
    if not isinstance(content, dict):
        raise JobError(f"{file} must hold a JSON object")
    return content


def resolve_sampling(
    settings: SamplingSettings,
    generation_config: Mapping[str, Any],
    *,
    eos_ids: Iterable[int] = (),
    vocab_limit: int | None = None,
    rules: RuleMaker | None = None,
) -> Sampling:
    """The values of a job in force. `rules` makes those that are about text.

    `eos_ids` are what the tokenizer and config.json name as end of text; those of the generation
    config are added. `vocab_limit`: one more than the highest token id.
    """
    listed = _id_list(generation_config.get("eos_token_id"))
    eos = frozenset(eos_ids) | listed
    sources: dict[str, Sourced] = {}
    columns: dict[str, str] = {}
    values: dict[str, Any] = {}
    try:
        for name in (*MODEL_RULES, *JOB_FIELDS):
            given = getattr(settings, name)
            if isinstance(given, StructuredSettings):
                given = given.plain
            if isinstance(given, ColumnRef):
                columns[name] = given.column
                sources[name] = Sourced({"column": given.column}, "job")
                given = _unset(name)
                values[name] = _resolve(name, given, False, generation_config, vocab_limit).value
            else:
                is_given = name in settings.model_fields_set
                sources[name] = _resolve(name, given, is_given, generation_config, vocab_limit)
                values[name] = sources[name].value
        params = make_params(values, eos, vocab_limit, rules)
        if rules is not None and "structured" in columns:
            _check_compiler(rules)
    except BadValue as fault:
        raise JobError(str(fault)) from None
    sources["eos_token_ids"] = Sourced(
        tuple(sorted(eos)), "generation_config" if listed else "default"
    )
    return Sampling(
        params=params,
        seed=values["seed"],
        sources=sources,
        columns=columns,
        values=values,
        eos_ids=eos,
        vocab_limit=vocab_limit,
        rules=rules,
        structured_kind=None if settings.structured is None else settings.structured.column_kind,
    )


def _check_compiler(rules: RuleMaker) -> None:
    """Rows will need it."""
    try:
        assert rules.compiler is not None, "made or refused"
    except ValueError as fault:
        raise BadValue(f"sampling.structured: {fault}") from None


def _unset(name: str) -> Any:
    """The value of a field that the job file does not give."""
    return SamplingSettings.model_fields[name].default


def _resolve(
    name: str,
    value: Any,
    is_given: bool,
    config: Mapping[str, Any],
    vocab_limit: int | None,
) -> Sourced:
    where = f"sampling.{name}"
    if name not in MODEL_RULES:
        if value is not None:
            value = read_value(name, where, value, vocab_limit)
        return Sourced(value, "job" if is_given else "default")
    if value is not None:
        return Sourced(read_value(name, where, value, vocab_limit), "job")
    if name == "temperature" and config.get("do_sample") is False:
        return Sourced(0.0, "generation_config")
    value = config.get(name)
    if value is None:
        return Sourced(MODEL_RULES[name].neutral, "default")
    found = read_value(name, f"{_FILE}: {name}", value, vocab_limit)
    return Sourced(found, "generation_config")


def _id_list(value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise JobError(f"{_FILE}: eos_token_id: {value!r} must be a token id or a list of them")
    return frozenset(ids)
