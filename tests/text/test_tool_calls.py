"""Calls in content: read exactly, or left where they are with the reason."""

import json

import numpy as np
import pytest
from chat_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.text.formats.calls import no_schemas
from batchmla.text.formats.registry import FORMATS
from batchmla.text.json_text import is_json, members
from batchmla.text.tokenizer import Tokenizer
from batchmla.text.tool_calls import CallReader

R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V3 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
)
KIMI_CALL = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
JSON_CALLS = {  # begin, call, end
    "deepseek_r1": (DEEPSEEK[0], R1, DEEPSEEK[1]),
    "deepseek_v3": (DEEPSEEK[0], V3, DEEPSEEK[1]),
    "qwen3": ("<tool_call>\n", '{{"name": "{}", "arguments": {}}}', "\n</tool_call>"),
    "kimi_k2": (KIMI[0], KIMI_CALL, KIMI[1]),
}


def _parse(name, content, schemas=no_schemas):
    return FORMATS[name].tools.parse(content, schemas)


def _pairs(read):
    return [(call.name, call.arguments) for call in read.calls]


@pytest.mark.parametrize("name", JSON_CALLS)
@pytest.mark.parametrize("arguments", ["{}", '{"a": 1.50, "b": "\\u00fc"}', '{ "a": {"b": [1]}}'])
def test_arguments_come_out_as_they_were_written(name, arguments):
    begin, call, end = JSON_CALLS[name]
    read = _parse(name, f"text{begin}{call.format('f', arguments)}{end}")
    assert _pairs(read) == [("f", arguments)] and read.error is None
    assert read.content == "text"


BROKEN = (
    "",
    "{",
    '{"a": }',
    "[1]",
    "null",
    '"{}"',
    '{"a": NaN}',
    '{"a": Infinity}',
    '{"a": 1, "a": 2}',
    '{"a": "1\n2"}',
    "{'a': 1}",
    '{"a": 1} {}',
    "{" * 3000,
)


@pytest.mark.parametrize("name", JSON_CALLS)
@pytest.mark.parametrize("arguments", BROKEN)
def test_broken_arguments_are_never_guessed(name, arguments):
    begin, call, end = JSON_CALLS[name]
    content = f"before {begin}{call.format('f', arguments)}{end} after"
    read = _parse(name, content)
    assert read.calls == () and read.content == content
    assert read.error is not None and begin.strip()[:11] in read.error


@pytest.mark.parametrize("name", JSON_CALLS)
def test_a_section_without_end_and_an_end_without_section(name):
    begin, call, end = JSON_CALLS[name]
    for content in (f"a{begin}{call.format('f', '{}')}", f"a{call.format('f', '{}')}{end}", end):
        read = _parse(name, content)
        assert (read.content, read.calls) == (content, ()) and read.error is not None


def test_good_sections_are_read_beside_bad_ones():
    begin, call, end = JSON_CALLS["qwen3"]
    good, bad = (f"{begin}{call.format('f', a)}{end}" for a in ('{"x": 1}', "{"))
    read = _parse("qwen3", f"one\n{good} two {bad}\n{good}three")
    assert _pairs(read) == [("f", '{"x": 1}')] * 2
    assert read.content == f"one two {bad}three"
    assert read.error.startswith("a call cannot be read: ")


def test_the_end_tag_may_stand_in_a_string():
    begin, call, end = JSON_CALLS["qwen3"]
    arguments = '{"x": "a</tool_call>b<tool_call>"}'
    read = _parse("qwen3", f"{begin}{call.format('f', arguments)}{end}")
    assert _pairs(read) == [("f", arguments)] and read.content == ""


@pytest.mark.parametrize(
    ("name", "body", "sentence"),
    [
        ("qwen3", '{"name": "f"}', "a call has no name or no arguments"),
        ("qwen3", '{"name": 1, "arguments": {}}', "a call has no name or no arguments"),
        ("qwen3", '{"name": "\\ud800", "arguments": {}}', "half a character"),
        ("qwen3", '{"name": " f", "arguments": {}}', "a call has the name ' f'"),
        ("qwen3", "", "a call cannot be read: it is not a JSON object"),
        ("kimi_k2", "", "there is no call in it"),
        ("kimi_k2", "f", "a call is not enclosed in"),
        ("kimi_k2", KIMI_CALL.format("f", "{}").replace("functions.", ""), "functions.NAME:INDEX"),
        ("deepseek_r1", V3.format("f", "{}"), "a call is not a name and a block of JSON"),
        ("deepseek_v3", R1.format("f", "{}"), "the arguments of function cannot be read"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "no <｜tool▁sep｜> behind"),
        ("deepseek_v32", "\n", "there is no call in it"),
        ("deepseek_v32", "\nf", "a call is not enclosed in <｜DSML｜invoke>"),
        ("minimax_m2", "\nf", "a call is not enclosed in <invoke>"),
        ("minimax_m2", "\n", "there is no call in it"),
    ],
)
def test_reasons(name, body, sentence):
    syntax = FORMATS[name].tools
    content = f"{syntax.begin}{body}{syntax.end}"
    read = _parse(name, content)
    assert read.content == content and read.calls == ()
    assert sentence in read.error


def _dsml(*parameters):
    return (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        + "\n".join(f"<｜DSML｜parameter {each}</｜DSML｜parameter>" for each in parameters)
        + "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )


def test_dsml_values_are_text_or_json():
    read = _parse(
        "deepseek_v4",
        _dsml(
            'name="a" string="true"> 1\n"x" ',
            'name="b" string="false"> 1.50 ',
            'name="c" string="false">{"d": [null]}',
            'name="e" string="true">',
        ),
    )
    assert _pairs(read) == [("f", '{"a": " 1\\n\\"x\\" ", "b": 1.50, "c": {"d": [null]}, "e": ""}')]


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        (['name="a" string="false">yes'], "'a' is not JSON"),
        (['name="a" string="false">'], "'a' is not JSON"),
        (['name="a" string="maybe">1'], "a parameter is broken"),
        (['name="a">1'], "a parameter is broken"),
        (['name="a" string="true">1', 'name="a" string="true">2'], "'a' twice"),
        (['name="a" string="true">1<｜DSML｜'], "a parameter is broken"),
    ],
)
def test_dsml_that_is_broken(parameters, sentence):
    read = _parse("deepseek_v4", _dsml(*parameters))
    assert read.calls == () and sentence in read.error


def test_an_unclosed_parameter_swallows_no_other_call():
    block = _dsml('name="a" string="true">1').replace("</｜DSML｜parameter>", "")
    content = block + _dsml('name="b" string="true">2')
    read = _parse("deepseek_v4", content)
    assert _pairs(read) == [("f", '{"b": "2"}')] and read.content == block


def _minimax(**values):
    lines = [f'<parameter name="{name}">{value}</parameter>' for name, value in values.items()]
    body = "\n".join(['<invoke name="f">', *lines, "</invoke>"])
    return f"<minimax:tool_call>\n{body}\n</minimax:tool_call>"


SCHEMAS = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "o": {"type": ["object", "null"]},
    "e": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "x": {"description": "no type"},
}


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({"s": "12", "n": "12"}, '{"s": "12", "n": 12}'),
        ({"o": '{"a": 1.50}', "e": "null"}, '{"o": {"a": 1.50}, "e": "null"}'),
        ({"o": "null", "x": "true", "y": "tru"}, '{"o": null, "x": true, "y": "tru"}'),
        ({"y": " [1] ", "s": ""}, '{"y": [1], "s": ""}'),
    ],
)
def test_minimax_values_have_the_types_of_the_schema(values, arguments):
    read = _parse("minimax_m2", _minimax(**values), lambda name: SCHEMAS)
    assert _pairs(read) == [("f", arguments)]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"n": "twelve"}, "'n' is no integer in JSON"),
        ({"s": 'a</invoke><invoke name="g">'}, "a call is not enclosed|a parameter is broken"),
        ({"s": '1<parameter name="x">2'}, "a parameter is broken"),
    ],
)
def test_minimax_that_is_broken(values, sentence):
    read = _parse("minimax_m2", _minimax(**values), lambda name: SCHEMAS)
    assert read.calls == () and read.content == _minimax(**values)
    assert any(each in read.error for each in sentence.split("|"))


def test_schemas_come_from_the_rows_tools(tmp_path):
    tokenizer = Tokenizer.load(FAMILIES["minimax_m2"].write(tmp_path))
    reader = CallReader(tokenizer, FORMATS["minimax_m2"])
    tools = [{"function": {"name": "f", "parameters": {"properties": SCHEMAS}}}]
    tools += [{"function": {"name": "g"}}, {"function": {"name": "h", "parameters": None}}]
    assert _pairs(reader.read(_minimax(s="1"), json.dumps(tools))) == [("f", '{"s": "1"}')]
    assert _pairs(reader.read(_minimax(s="1"), "[]")) == [("f", '{"s": 1}')]


def test_calls_are_looked_for_where_tools_are_given_or_shown(tmp_path):
    tokenizer = Tokenizer.load(FAMILIES["qwen3"].write(tmp_path))
    reader = CallReader(tokenizer, FORMATS["qwen3"])
    shown = tokenizer.encode("<|im_start|>user\n<tool_call>")
    assert reader.is_asked(shown, None)
    assert not reader.is_asked(tokenizer.encode_plain("<tool_call>"), None)
    assert reader.is_asked(tokenizer.encode("a"), "[]")
    none = CallReader(tokenizer, FORMATS["none"])
    assert not none.has_syntax and not none.is_asked(shown, "[]")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_members_are_those_of_the_object(value, is_ascii):
    found = members(json.dumps(value, ensure_ascii=is_ascii))
    assert {name: json.loads(text) for name, text in found.items()} == value
    assert all(is_json(text) for text in found.values())


FRAGMENTS = st.sampled_from(
    [
        "{", "}", '"a"', ":", "1", ",", "\n", "text", '{"name": "f", "arguments": {"a": 1}}',
        *(part for each in FORMATS.values() if each.tools is not None
          for part in (each.tools.begin, each.tools.end, *each.tools.traces)),
        '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", '<invoke name="f">', "</invoke>",
        '<｜DSML｜parameter name="p" string="false">', "</｜DSML｜parameter>",
        '<parameter name="p">', "</parameter>", "functions.f:0", "```json\n", "\n```",
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from([n for n, f in FORMATS.items() if f.tools]), st.lists(FRAGMENTS))
def test_any_text_is_read_or_kept(name, fragments):
    content = "".join(fragments)
    read = _parse(name, content)
    if not read.calls:
        assert read.content == content
    for call in read.calls:
        assert isinstance(json.loads(call.arguments), dict) and call.name
    syntax = FORMATS[name].tools
    is_left = any(trace in read.content for trace in (syntax.begin, *syntax.traces))
    assert (read.error is not None) == is_left


def test_ids_of_calls_are_those_of_the_vocabulary(tmp_path):
    tokenizer = Tokenizer.load(FAMILIES["deepseek_v4"].write(tmp_path))
    reader = CallReader(tokenizer, FORMATS["deepseek_v4"])
    mark = tokenizer.control_id("｜DSML｜")
    assert reader.is_asked(np.array([mark], dtype=np.int32), None)
