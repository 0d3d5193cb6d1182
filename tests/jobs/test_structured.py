"""What sampling.structured may hold, from a job, a column or a request."""

from decimal import Decimal

import pytest

from batchmla.jobs.sampling import resolve_sampling
from batchmla.jobs.sampling_values import BadValue, read_value
from batchmla.jobs.settings import SamplingSettings
from batchmla.jobs.structured import of_request, read_structured

SCHEMA = {"type": "object", "properties": {"a": {"const": None}}}


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ({"regex": "a+", "choice": None}, {"regex": "a+"}),
        ('{"json_schema": {"type": "integer"}}', {"json_schema": {"type": "integer"}}),
        ({"json_schema": '{"enum": [null]}'}, {"json_schema": {"enum": [None]}}),
        ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
        ({"json_schema": True}, {"json_schema": True}),
        ({"choice": ("a", "b")}, {"choice": ["a", "b"]}),
        ({"grammar": "start: A"}, {"grammar": "start: A"}),
    ],
)
def test_one_kind_in_its_plain_form(value: object, want: object) -> None:
    assert read_structured(value) == want


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "one of the keys json_schema, regex, choice, grammar"),
        ({"regex": "a", "choice": ["b"]}, "one of the keys"),
        ({"json": {}}, "one of the keys"),
        ("[1]", "one of the keys"),
        ("{", "must be JSON text"),
        (5, "one of the keys"),
        ({"json_schema": 5}, "a JSON schema"),
        ({"json_schema": "5"}, "a JSON schema"),
        ({"json_schema": {"minimum": Decimal(1)}}, "holds something else"),
        ({"json_schema": {"minimum": float("nan")}}, "holds something else"),
        ({"choice": []}, "a list of texts"),
        ({"choice": ["a", ""]}, "a list of texts"),
        ({"choice": "ab"}, "a list of texts"),
        ({"regex": ""}, "a text that is not empty"),
        ({"grammar": 1}, "a text that is not empty"),
    ],
)
def test_anything_else_is_refused(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_structured(value)
    with pytest.raises(BadValue, match=r"^sampling\.structured from column 's': "):
        read_value("structured", "sampling.structured from column 's'", value, None)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_regex": None}, None),
        (
            {"response_format": {"type": "json_object"}},
            ("body.response_format", {"json_schema": {"type": "object"}}),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            ("body.response_format", {"json_schema": SCHEMA}),
        ),
        ({"guided_json": SCHEMA}, ("body.guided_json", {"json_schema": SCHEMA})),
        ({"guided_choice": ["a"]}, ("body.guided_choice", {"choice": ["a"]})),
        (
            {"structured_outputs": {"json": SCHEMA}},
            ("body.structured_outputs", {"json_schema": SCHEMA}),
        ),
    ],
)
def test_requests_say_it_in_their_own_words(body: dict[str, object], want: object) -> None:
    assert of_request(body) == want


def test_the_jobs_section_names_a_kind_a_column_or_a_kind_from_a_column() -> None:
    whole = SamplingSettings.model_validate({"structured": {"column": "shape"}})
    made = resolve_sampling(whole, {})
    assert made.columns == {"structured": "shape"} and made.structured_kind is None
    assert made.from_columns({"shape": 1})["structured"] == (
        "sampling.structured from column 'shape'", 1,
    )  # fmt: skip
    one = SamplingSettings.model_validate({"structured": {"json_schema": {"column": "schema"}}})
    made = resolve_sampling(one, {})
    assert made.columns == {"structured": "schema"} and made.structured_kind == "json_schema"
    where = "sampling.structured.json_schema from column 'schema'"
    assert made.from_columns({"schema": 1})["structured"] == (where, {"json_schema": 1})
    assert made.from_columns({"schema": None})["structured"][1] is None
    own = SamplingSettings.model_validate({"structured": {"json_schema": SCHEMA}})
    assert resolve_sampling(own, {}).sources["structured"].value == {"json_schema": SCHEMA}


def test_structs_of_a_column_lose_the_keys_of_other_rows() -> None:
    one = SamplingSettings.model_validate({"structured": {"json_schema": {"column": "schema"}}})
    schema = {"type": "integer", "minimum": None, "anyOf": [{"maximum": 3, "type": None}]}
    given = resolve_sampling(one, {}).from_columns({"schema": schema})
    assert given["structured"][1] == {"json_schema": {"type": "integer", "anyOf": [{"maximum": 3}]}}
