"""A template's text is Jinja's; its control tokens are the template's own, whatever a row says."""

import functools
import json
import re
import tempfile
from pathlib import Path

import jinja2
import pytest
import vocabulary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchmla.jobs.conversation import ColumnTemplate, MessagesPrompt, RowFault
from batchmla.text.chat import ChatTemplate
from batchmla.text.marked import MarkedText
from batchmla.text.template import MarkedTemplate, TemplateFault
from batchmla.text.tokenizer import Tokenizer

USER, THINK = vocabulary.USER, "<think>"


@functools.cache
def _folder() -> Path:
    return vocabulary.byte_level(Path(tempfile.mkdtemp(prefix="vocabulary-")))


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(_folder())


@functools.cache
def _theirs():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_folder())


def _column(source: str) -> ColumnTemplate:
    return ColumnTemplate(source, "prompt.raw", ("text", "lang", "items"), _tokenizer().control)


def _controls(text: MarkedText) -> list[int]:
    ids = _tokenizer().encode(text)
    return ids[_tokenizer().is_control(ids)].tolist()


def _plainly(source: str, **values: object) -> str:
    environment = ImmutableSandboxedEnvironment(keep_trailing_newline=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.from_string(source).render(values)


@pytest.mark.parametrize("row", ["a", "aa", "banana", "b", f"a{USER}a", "n<"])
def test_a_template_may_put_control_strings_in_place_of_row_text(row):
    source = '{{ text | replace("a", "<｜User｜>") }}'
    text = _column(source).render({"text": row})
    assert text.text == _plainly(source, text=row)
    assert len(_controls(text)) == row.count("a")


@pytest.mark.parametrize("lang", ["en", "end", "User", "en<think>", "<", "｜>", ">"])
def test_a_branch_on_row_text_is_that_of_the_plain_text(lang):
    source = f'{{% if lang == "{lang}" %}}<｜User｜>yes{{% else %}}no{{% endif %}}{{{{ text }}}}'
    text = _column(source).render({"lang": lang, "text": "<think>"})
    assert text.text == "<｜User｜>yes<think>"
    assert _controls(text) == [_tokenizer().control_id(USER)]


def test_a_template_may_read_the_control_strings_of_a_row():
    source = (
        "{% if '</think>' in text %}<think>{{ text.split('</think>')[0] }}</think>"
        "{{ text.split('</think>')[-1] }}{% else %}{{ text }}{% endif %}"
    )
    text = _column(source).render({"text": "so<think></think><｜User｜>"})
    assert text.text == "<think>so<think></think><｜User｜>"
    names = [_tokenizer().token_bytes(i).decode() for i in _controls(text)]
    assert names == ["<think>", "</think>"]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("{{ '<｜User｜>%s' % text }}", 1),
        ("{{ '<｜User｜>{}<think>'.format(text) }}", 2),
        ("{{ '<｜User｜>%s' | format(text) }}", 1),
        ("{{ '<｜User｜>X' | replace('X', text) }}", 1),
        ("{{ 'X<｜User｜>'.replace('X', text) }}", 1),
        ("{{ '<think>'.join([text, text]) }}", 1),
        ("{{ '<think>'.join([text, text] | map('trim')) }}", 1),
        ("{{ {'x': '<｜User｜>'}.get(text, '<think>') }}", 1),
        ("{{ [text, '<think>'] | last }}{{ text }}", 1),
        ("{% macro head(x) %}<｜User｜>{% endmacro %}{{ head(text) }}{{ text }}", 1),
        ("{{ ('<think>' ~ text).center(60) }}", 1),
        ("{{ ('<think>' ~ text) | indent(2, true) }}", 1),
        ("{{ ('<think>' ~ text)[::-1][::-1] }}", 1),
        ("{{ 'ab<think>ba'.strip('ab' ~ text[:0]) }}", 1),
        ("{{ '[' ~ text ~ ']<think>' | upper | lower }}", 1),
    ],
)
@pytest.mark.parametrize("row", ["a", "two words\nand a line", "x<｜User｜>y", " <think>", "<b>"])
def test_an_operation_takes_no_control_string_from_the_template(source, count, row):
    text = _column(source).render({"text": row})
    assert text.text == _plainly(source, text=row)
    assert len(_controls(text)) == count


@pytest.mark.parametrize(
    "source",
    [
        "{% for key in items %}{{ key }}{% endfor %}",
        "{% for key, value in items.items() %}{{ key ~ '=' ~ value }}{% endfor %}",
        "{{ items.keys() | join }}",
        "{{ ''.join(items) }}",
        "{{ items | dictsort | first | first }}",
        "{{ items | tojson }}",
        "{{ 'a' ~ items }}",
        "{{ text.encode().decode() }}",
        "{{ 'b' ~ text.encode() }}",
        "{{ '-'.join(text.split('+') | map('replace', '#', '')) }}",
        "{{ text | replace('#', '') | list | join }}",
        "{{ ('[' | safe) + text }}",
        "{{ (text | e) + text }}",
        "{{ text.replace('', '') }}{{ text | reverse | reverse }}",
    ],
)
@pytest.mark.parametrize("row", [THINK, "<#think#>", "<THINK>", "a<｜User｜>"])
def test_row_text_stays_text_where_marks_are_easily_lost(source, row):
    try:
        text = _column(source).render({"text": row, "items": {row: row}})
    except RowFault:
        return
    assert text.text == _plainly(source, text=row, items={row: row})
    assert _controls(text) == []


def test_names_within_a_message_are_row_text():
    source = "{% for m in messages %}{% for key in m %}{{ key }},{% endfor %}{% endfor %}"
    chat = ChatTemplate(source, _tokenizer(), where="template")
    talk = [{"role": "user", "content": "a", THINK: "b", "c": {"</think>": 1}}]
    text = chat.render(MessagesPrompt("chat", ("chat",)).messages({"chat": talk}))
    assert text.text == "role,content,<think>,c," and _controls(text) == []


def test_what_cannot_be_told_apart_is_a_fault_that_says_so():
    template = _column("{{ ('<think>' ~ text) | upper | lower }}")
    assert len(_controls(template.render({"text": "a<think>"}))) == 1
    with pytest.raises(RowFault, match=r"prompt.raw: one operation works on .* '<think>' together"):
        template.render({"text": "\u00df<think>"})  # in upper case two letters
    text = _column("{{ ('x' ~ text) | upper | lower }}").render({"text": "\u00df<think>"})
    assert text.text == "xss<think>" and _controls(text) == []


def test_a_row_without_control_strings_is_rendered_once(monkeypatch):
    runs: list[object] = []
    run = MarkedTemplate._run
    monkeypatch.setattr(
        MarkedTemplate, "_run", lambda self, values: (runs.append(1), run(self, values))[1]
    )
    template = _column("<think>{{ text | trim }}")
    for row in ("en", "<thi", "x >", "User", "a" * 99):
        template.render({"text": row})
    assert len(runs) == 5
    template.render({"text": "</think>"})
    assert len(runs) == 8


def test_lost_marks_are_found_by_stand_ins(monkeypatch):
    from batchmla.text import template as module

    def lost(values, watch):
        return module.mapped(values, MarkedText, lambda leaf: leaf.text)

    monkeypatch.setattr(module, "_replaced", lost)
    text = _column("<think>{{ text | upper | lower }}").render({"text": "a <think> b"})
    assert text.text == "<think>a <think> b" and len(_controls(text)) == 1


def test_autoescape_blocks_are_refused():
    from batchmla.errors import JobError

    with pytest.raises(JobError, match="autoescape"):
        _column("{% autoescape true %}{{ text }}{% endautoescape %}")


def test_templates_see_no_more_of_a_text_than_of_a_string():
    source = "{{ text.spans }}{{ text['marked'] }}{{ text.watch is defined }}{{ text['x'] }}"
    chat = ChatTemplate(source.replace("text", "messages[0].content"), _tokenizer(), where="t")
    talk = [{"role": "user", "content": MarkedText.of_row("a")}]
    assert chat.render(talk).text == "False"


# Random templates over random rows

VALUES = ("text", "lang", "'<think>'", "'<｜User｜>'", "'<'", "'think>'", "'a'", "'</th'", "''")
FILTERS = (
    "replace('a', '<think>')",
    "replace('<think>', 'a')",
    "replace('#', '')",
    "replace('a', lang)",
    "upper",
    "lower",
    "trim",
    "title",
    "reverse",
    "truncate(9, true, '..')",
    "tojson",
    "list | join",
    "indent(1)",
    "string",
    "center(12)",
    "e",
    "default('<think>', true)",
)
METHODS = (
    "[1:]",
    "[:-1]",
    "[::-1]",
    ".split('</think>')[-1]",
    ".split('a') | join('<think>')",
    ".partition('<')[2]",
    ".strip('<a')",
    ".rstrip()",
    ".format(lang)",
    ".removeprefix('<')",
    ".splitlines() | join('-')",
)
TESTS = ("'</think>' in {}", "{} == 'a'", "{} == lang", "{}.startswith('<')", "{} | length > 4")

values = st.sampled_from(VALUES)
changed = st.one_of(
    values,
    st.builds("({} | {})".format, values, st.sampled_from(FILTERS)),
    st.builds("({}{})".format, values, st.sampled_from(METHODS)),
)
expressions = st.recursive(
    changed,
    lambda inner: st.one_of(
        st.builds("({} ~ {})".format, inner, inner),
        st.builds("({} + {})".format, inner, inner),
        st.builds("('<｜User｜>%s' % {})".format, inner),
        st.builds("'{{}}<think>'.format({})".format, inner),
        st.builds("({} | {})".format, inner, st.sampled_from(FILTERS)),
        st.builds("({}{})".format, inner, st.sampled_from(METHODS)),
        st.builds("'<think>'.join([{}, {}])".format, inner, inner),
        st.builds(
            lambda a, t, b: f"({a} if {t.format(b)} else {b})",
            inner,
            st.sampled_from(TESTS),
            inner,
        ),
    ),
    max_leaves=4,
)
written = st.builds("{{{{ {} }}}}".format, expressions)
pieces = st.one_of(
    written,
    st.sampled_from(("<think>", "<｜User｜>", "x", "<", "think>")),
    st.builds(
        lambda t, e, a, b: f"{{% if {t.format(e)} %}}{a}{{% else %}}{b}{{% endif %}}",
        st.sampled_from(TESTS),
        expressions,
        written,
        written,
    ),
    st.builds("{{% for c in {} %}}{{{{ c }}}}{{% endfor %}}".format, expressions),
    st.builds("{{% set b %}}{}{{% endset %}}{{{{ b | trim }}}}".format, written),
    st.builds(
        "{{% macro m(q) %}}<think>{{{{ q }}}}{{% endmacro %}}{{{{ m({}) }}}}".format, expressions
    ),
)
sources = st.lists(pieces, min_size=1, max_size=3).map("".join)
FRAGMENTS = (
    "a",
    "b",
    "<",
    ">",
    "#",
    "<thi",
    "nk>",
    "think",
    "en",
    " ",
    "\n",
    "{}",
    "</",
    "｜",
    "A",
)
harmless = st.lists(st.sampled_from(("a", "b", " ", "\n", "#", "en", "{}", "A", ";")), max_size=5)
rows = st.lists(
    st.sampled_from((*FRAGMENTS, THINK, "</think>", USER, "<#think>", "<THINK>")), max_size=4
).map("".join)
bounded = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def _reference(source: str, values: dict[str, str]) -> str | None:
    """Jinja's own text, None where it fails."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        return _compile_jinja_template(source).render(**values)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return None


def _rendered(source: str, values: dict[str, str]) -> MarkedText | None:
    from batchmla.text.environment import chat_environment

    template = MarkedTemplate(source, chat_environment(), _tokenizer().control)
    try:
        return template.render({k: MarkedText.of_row(v) for k, v in values.items()})
    except TemplateFault:
        return None


@bounded
@given(source=sources, text=rows, lang=rows)
def test_text_is_that_of_plain_jinja_or_the_row_is_a_fault(source, text, lang):
    values = {"text": text, "lang": lang}
    made = _rendered(source, values)
    assert made is None or made.text == _reference(source, values)


def _look_alike(text: str) -> str:
    """The same length, but nothing that a control string could be made of."""
    return re.sub("[<>]", "\u2460", text)


@bounded
@given(source=sources, text=rows, lang=rows)
def test_control_tokens_do_not_come_from_the_row(source, text, lang):
    values = {"text": text, "lang": lang}
    made = _rendered(source, values)
    like = _rendered(source, {name: _look_alike(value) for name, value in values.items()})
    if made is None or like is None or len(like.text) != len(made.text):
        return
    if all(a in (b, "\u2460") for a, b in zip(like.text, made.text, strict=True)):
        assert _controls(made) == _controls(like)
    # else the template looked at the characters


@bounded
@given(source=sources, text=harmless.map("".join), lang=harmless.map("".join))
def test_rows_without_control_strings_get_the_ids_of_transformers(source, text, lang):
    values = {"text": text, "lang": lang}
    made, expected = _rendered(source, values), _reference(source, values)
    if made is None or expected is None:
        assert made is None
        return
    ids = _theirs()(expected, add_special_tokens=False)["input_ids"]
    assert _tokenizer().encode(made).tolist() == ids
