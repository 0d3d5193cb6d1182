"""Sampling values: the job's, else the model's, else neutral; each with its source."""

import json
from decimal import Decimal
from typing import Any

import pytest

from batchmla.errors import JobError
from batchmla.jobs.sampling import Sampling, read_generation_config, resolve_sampling
from batchmla.jobs.sampling_values import ROW_FIELDS, BadValue
from batchmla.jobs.settings import SamplingSettings


def test_neutral_values_without_any_source():
    made = resolve_sampling(SamplingSettings(), {})
    params = made.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.max_tokens, params.min_tokens) == (1.0, None, 0)
    assert params.stop_ids == frozenset() and made.seed == 0
    assert {each.source for each in made.sources.values()} == {"default"}


def test_the_job_wins_over_the_model():
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    made = resolve_sampling(SamplingSettings(temperature=0.0, top_k=0), config)
    assert made.params.temperature == 0.0 and made.params.top_k == 0
    assert made.params.top_p == 0.95 and made.params.repetition_penalty == 1.1
    assert made.sources["temperature"].source == "job"
    assert made.sources["top_p"].source == "generation_config"
    assert made.sources["min_p"].source == "default"


def test_do_sample_false_is_greedy_unless_the_job_says_otherwise():
    config = {"do_sample": False, "temperature": 0.7}
    made = resolve_sampling(SamplingSettings(), config)
    assert made.params.temperature == 0.0
    assert made.sources["temperature"].source == "generation_config"
    assert resolve_sampling(SamplingSettings(temperature=0.3), config).params.temperature == 0.3
    assert resolve_sampling(SamplingSettings(), {"temperature": 0.7}).params.temperature == 0.7


@pytest.mark.parametrize(
    ("eos", "expected"), [(5, {2, 5}), ([5, 106], {2, 5, 106}), (None, {2}), ([], {2})]
)
def test_end_of_text_ids_are_joined_from_all_sources(eos, expected):
    made = resolve_sampling(
        SamplingSettings(stop_token_ids=[9]), {"eos_token_id": eos}, eos_ids=[2], vocab_limit=200
    )
    assert made.params.stop_ids == expected | {9}
    ignoring = SamplingSettings(stop_token_ids=[9], ignore_eos=True)
    assert resolve_sampling(ignoring, {"eos_token_id": eos}, eos_ids=[2]).params.stop_ids == {9}


def test_the_jobs_other_values_go_through():
    settings = SamplingSettings(max_tokens=7, min_tokens=3, seed=-4, min_p=0.1)
    made = resolve_sampling(settings, {})
    assert (made.params.max_tokens, made.params.min_tokens, made.seed) == (7, 3, -4)
    assert made.sources["max_tokens"].source == "job"
    assert made.params.min_p == 0.1


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"min_p": True}, "min_p"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
    ],
)
def test_values_of_the_model_out_of_range_are_named(config, field):
    with pytest.raises(JobError, match=f"generation_config.json: {field}: "):
        resolve_sampling(SamplingSettings(), config)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"stop_token_ids": (100,)}, "stop_token_ids"),
    ],
)
def test_values_of_the_job_out_of_range_are_named(values, field):
    settings = SamplingSettings.model_construct(**{**SamplingSettings().model_dump(), **values})
    with pytest.raises(JobError, match=f"sampling.{field}: "):
        resolve_sampling(settings, {}, vocab_limit=100)


def test_generation_config_files(tmp_path):
    assert read_generation_config(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_k": 3}))
    assert read_generation_config(tmp_path) == {"top_k": 3}
    for broken in ("{", "[]"):
        file.write_text(broken)
        with pytest.raises(JobError, match=r"generation_config\.json"):
            read_generation_config(tmp_path)


def test_stop_ids_that_are_all_tokens_leave_nothing_to_draw_before_min_tokens():
    settings = SamplingSettings(stop_token_ids=[0, 1, 2], min_tokens=1)
    with pytest.raises(JobError, match="none is left to draw"):
        resolve_sampling(settings, {}, eos_ids=[3], vocab_limit=4)
    resolve_sampling(settings, {}, eos_ids=[3], vocab_limit=5)
    resolve_sampling(SamplingSettings(stop_token_ids=[0]), {}, eos_ids=[1], vocab_limit=2)


def by_row(config: dict[str, Any] | None = None, **job: Any) -> Sampling:
    """Every field that a row may bring comes from a column of its name, but for those of `job`."""
    columns = {name: {"column": name} for name in ROW_FIELDS}
    settings = SamplingSettings.model_validate({**columns, **job})
    return resolve_sampling(settings, config or {}, eos_ids=[2], vocab_limit=100)


def test_a_row_brings_its_own_values():
    made = by_row()
    row = {
        "temperature": 0, "top_p": 0.5, "top_k": 7.0, "min_p": Decimal("0.25"), "seed": -3,
        "repetition_penalty": 1.5, "max_tokens": Decimal(9), "min_tokens": 1,
        "stop_token_ids": [5, 6], "ignore_eos": True,
    }  # fmt: skip
    params, seed = made.of_row(made.from_columns(row))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 7, 0.25)
    assert (params.repetition_penalty, params.max_tokens, params.min_tokens) == (1.5, 9, 1)
    assert params.stop_ids == {5, 6} and seed == -3
    assert type(params.temperature) is float and type(params.top_k) is int
    assert made.sources["top_k"].value == {"column": "top_k"}


def test_a_null_is_a_field_that_the_job_does_not_give():
    config = {"temperature": 0.6, "top_k": 20, "eos_token_id": [3]}
    made = by_row(config)
    params, seed = made.of_row(made.from_columns({"temperature": None, "top_k": float("nan")}))
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 1.0)
    assert params.stop_ids == {2, 3} and params.max_tokens is None and seed == 0
    only_one, _ = made.of_row(made.from_columns({"top_p": 0.9}))
    assert (only_one.temperature, only_one.top_p) == (0.6, 0.9)
    assert by_row(config, temperature=0.1).of_row({})[0].temperature == 0.1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", -0.5, "-0.5 is out of range; it must be 0 or more"),
        ("temperature", "0.5", "'0.5' is out of range"),
        ("temperature", True, "True is out of range"),
        ("temperature", float("inf"), "inf is out of range"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_k", 1.5, "a whole number, 0 or more"),
        ("max_tokens", 0, "a whole number, 1 or more"),
        ("seed", 2**64, "a whole number of 64 bits"),
        ("stop_token_ids", [5, 100], "100 is no token of the model; its ids end at 99"),
        ("stop_token_ids", 5, "it must be a list of token ids"),
        ("ignore_eos", 1, "it must be true or false"),
    ],
)
def test_a_value_that_a_row_cannot_take_names_field_and_column(name, value, said):
    made = by_row()
    with pytest.raises(BadValue) as caught:
        made.of_row(made.from_columns({name: value}))
    assert str(caught.value).startswith(f"sampling.{name} from column {name!r}: ")
    assert said in str(caught.value)


def test_values_of_a_row_must_not_contradict_the_jobs():
    made = by_row(min_tokens=5)
    with pytest.raises(BadValue, match=r"min_tokens: 5 is out of range.*which is 3"):
        made.of_row(made.from_columns({"max_tokens": 3}))
    assert made.of_row(made.from_columns({"max_tokens": 5}))[0].max_tokens == 5
