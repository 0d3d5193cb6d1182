"""Sampling values: the job's, else the model's, else neutral; each with its source."""

import json

import pytest

from batchmla.errors import JobError
from batchmla.jobs.sampling import read_generation_config, resolve_sampling
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
