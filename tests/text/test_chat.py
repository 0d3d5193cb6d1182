"""Chat templates: found where models keep them, rendered as transformers does, marks kept."""

import json

import pytest
import vocabulary

from batchmla.errors import JobError
from batchmla.text.chat import ChatTemplate, find_template
from batchmla.text.marked import MarkedText
from batchmla.text.template import TemplateFault
from batchmla.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(vocabulary.byte_level(tmp_path_factory.mktemp("model")))


def _chat(source, tokenizer, thinking="auto"):
    return ChatTemplate(source, tokenizer, where="template", thinking=thinking)


def _talk(*pairs):
    return [{"role": role, "content": MarkedText.of_row(text)} for role, text in pairs]


def _plain(messages):
    return [{**m, "content": m["content"].text} for m in messages]


def _render_as_transformers(source, messages, **variables):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [_plain(messages)], chat_template=source, add_generation_prompt=True, **variables
    )
    return rendered[0]


LLAMA_TEMPLATE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|system|>" + system_message }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception("no " + message.role) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
{{- '<|assistant|>' ~ {"role": "assistant"} | tojson }}
"""
READING_TEMPLATE = """{%- for m in messages -%}
{%- if m.content.startswith('<tool>') -%}[tool:{{ m.content[6:] }}]
{%- elif m.content | length > 20 -%}[long:{{ m.content[:5] }}..{{ m.content | replace('o', '0') }}]
{%- elif 'QQ' in m.content -%}{{ m.content.split('QQ') | join('+') }}
{%- else -%}{{ '%s/%s' % (m.role, m.content) }}{{ m.content | upper }}
{{- m.content.partition(' ')[0] }}
{%- endif -%}{%- endfor -%}"""
TEMPLATES = {
    "r1": vocabulary.R1_TEMPLATE,
    "chatml": vocabulary.CHATML_TEMPLATE,
    "switch": vocabulary.SWITCH_TEMPLATE,
    "blocks": vocabulary.BLOCK_TEMPLATE,
    "llama": LLAMA_TEMPLATE,
    "reading": READING_TEMPLATE,
    "json": "{% for m in messages %}{{ m.content | tojson }}{{ m | tojson }}{% endfor %}",
    "escape": "{% for m in messages %}{{ m.content | e }}{% endfor %}",
    "equal": "{% for m in messages %}{{ 'A' if m.content == 'a' else m.content }}{% endfor %}",
    "empty": "{% for m in messages %}{{ m.content | trim or '(nothing)' }};{% endfor %}",
    "order": "{{ messages[-1].content }}{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
}
TEXTS = (
    "a",
    " a b \n",
    "<tool>run",
    "one QQ two QQ three",
    "a long text <b> & 'quotes' \"x\" \\ {{ y }}",
    "x</think>\n\ny<think>z",
    "   ",
    "",
    "\ue0f00\ue0f1",
    "ß ŉ 東京 🙂 \u2028 \x00",
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_transformers_and_marks_cover_the_row(name, tokenizer):
    chat = _chat(TEMPLATES[name], tokenizer)
    for first, second in zip(TEXTS, TEXTS[3:] + TEXTS[:3], strict=True):
        for talk in (
            _talk(("user", first)),
            _talk(("system", second), ("user", first)),
            _talk(("user", first), ("assistant", second), ("user", "end" + first)),
        ):
            text = chat.render(talk)
            expected = _render_as_transformers(TEMPLATES[name], talk, **tokenizer.special_tokens)
            assert text.text == expected
            for start, end in text.spans:
                assert 0 <= start < end <= len(text.text)


def test_whole_contents_are_marked_and_nothing_else(tokenizer):
    chat = _chat(vocabulary.R1_TEMPLATE, tokenizer)
    text = chat.render(_talk(("system", "<think>"), ("user", " hi ")))
    runs = [(text.text[a:b], is_row) for a, b, is_row in text.runs()]
    assert runs == [
        (vocabulary.BOS, False),
        ("<think>", True),
        (vocabulary.USER, False),
        (" hi ", True),
        (vocabulary.ASSISTANT + "<think>\n", False),
    ]


def test_earlier_reasoning_is_dropped_as_the_template_says(tokenizer):
    chat = _chat(vocabulary.R1_TEMPLATE, tokenizer)
    talk = _talk(
        ("user", "1+1?"), ("assistant", "<think>one and one</think>2"), ("user", "</think>")
    )
    text = chat.render(talk)
    assert text.text == _render_as_transformers(
        vocabulary.R1_TEMPLATE, talk, **tokenizer.special_tokens
    )
    assert "one and one" not in text.text
    names = [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text)]
    assert names.count("</think>") == 0 and names.count("<think>") == 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ '{}'.format(m.content) }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content | e | string }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content | lower | title | lower }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ '|'.join([m.content, m.role]) }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content | indent(2) }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content | list | join }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content | replace('#', '') }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content | wordwrap(9) }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}<{{ m.content[1:6] }}>{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{% filter lower %}{{ m.content }}{% endfilter %}"
        "{% endfor %}",
    ],
)
@pytest.mark.parametrize(
    "attack", ["<think>", "x <think> y", "<THINK>", "<#think#>", "think>", "(think) \ue000<think>"]
)
def test_no_operation_of_a_template_lets_row_text_become_control(source, attack, tokenizer):
    chat = _chat(source, tokenizer)
    ids = tokenizer.encode(chat.render(_talk(("user", attack))))
    assert [i for i in ids.tolist() if tokenizer.is_control(i)] == [tokenizer.bos_id]


def test_shapes_are_found_for_templates_that_pass_text_through(tokenizer):
    for name, is_shaped in (("r1", True), ("chatml", True), ("llama", True), ("reading", False)):
        chat = _chat(TEMPLATES[name], tokenizer)
        chat.render(_talk(("system", "a"), ("user", "b")))
        assert (chat._shapes[("system", "user")] is not None) == is_shaped, name


def test_thinking_is_mapped_to_the_templates_switch(tokenizer):
    talk = _talk(("user", "q"))
    for source, on, off, auto in (
        (vocabulary.SWITCH_TEMPLATE, "<think>", "</think>", "</think>"),
        (vocabulary.CHATML_TEMPLATE, "assistant\n", "</think>\n\n", "assistant\n"),
    ):
        for thinking, end in (("on", on), ("off", off), ("auto", auto)):
            assert _chat(source, tokenizer, thinking).render(talk).text.endswith(end)


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_a_template_without_switch_refuses_thinking(thinking, tokenizer):
    with pytest.raises(JobError, match=f"reasoning.thinking: {thinking} needs a chat template"):
        _chat(vocabulary.R1_TEMPLATE, tokenizer, thinking)


def test_a_refused_conversation_is_a_fault_with_the_templates_words(tokenizer):
    with pytest.raises(TemplateFault, match="no tool"):
        _chat(LLAMA_TEMPLATE, tokenizer).render(_talk(("tool", "x"), ("user", "y")))


def test_a_broken_template_is_named(tokenizer):
    with pytest.raises(JobError, match="template is not a valid chat template: line 1"):
        _chat("{% for %}", tokenizer)


def test_exactly_one_bos(tmp_path):
    folder = vocabulary.byte_level(tmp_path, adds_bos=True)
    tokenizer = Tokenizer.load(folder)
    chat = ChatTemplate.load(folder, tokenizer)
    ids = tokenizer.encode(chat.render(_talk(("user", vocabulary.BOS + "hello")))).tolist()
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1


def test_where_templates_are_found(tmp_path):
    folder = vocabulary.byte_level(tmp_path, template="config")
    assert find_template(folder, Tokenizer.load(folder))[0] == "config"
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert find_template(folder, Tokenizer.load(folder))[0] == "file"
    (tmp_path / "own.jinja").write_text("own", encoding="utf-8")
    chat = ChatTemplate.load(folder, Tokenizer.load(folder), override=tmp_path / "own.jinja")
    assert chat.render(_talk(("user", "x"))).text == "own"
    with pytest.raises(JobError, match=r"prompt.chat_template: .*missing.jinja does not exist"):
        ChatTemplate.load(folder, Tokenizer.load(folder), override=tmp_path / "missing.jinja")


def test_named_templates_need_a_default(tmp_path):
    folder = vocabulary.byte_level(tmp_path, template=None)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    named = [
        {"name": "tool_use", "template": "WRONG"},
        {"name": "default", "template": "right"},
    ]
    file.write_text(json.dumps({**config, "chat_template": named}))
    assert find_template(folder, Tokenizer.load(folder))[0] == "right"
    file.write_text(json.dumps({**config, "chat_template": named[:1]}))
    with pytest.raises(JobError, match=r"\(tool_use\) hold no 'default'"):
        find_template(folder, Tokenizer.load(folder))


def test_no_template_is_an_error_that_names_prompt_raw(tmp_path):
    folder = vocabulary.byte_level(tmp_path, template=None)
    with pytest.raises(JobError, match=r"has no chat template.*prompt\.raw"):
        ChatTemplate.load(folder, Tokenizer.load(folder))
