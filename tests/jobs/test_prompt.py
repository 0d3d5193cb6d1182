"""Rows become prompts: texts, faults, budgets, random streams."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import vocabulary

from batchmla.errors import JobError
from batchmla.jobs.prompt import PromptMaker, stream_key
from batchmla.jobs.row import Row
from batchmla.jobs.sampling import resolve_sampling
from batchmla.jobs.spec import build_spec
from batchmla.text.chat import ChatTemplate
from batchmla.text.formats.registry import choose_format
from batchmla.text.reasoning import Reasoner
from batchmla.text.tokenizer import Tokenizer

COLUMNS = ("text", "lang", "chat", "items", "number")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return vocabulary.byte_level(tmp_path_factory.mktemp("model"))


def _maker(folder, *, columns=COLUMNS, limit=None, **sections) -> PromptMaker:
    spec = build_spec(
        {"model": {"path": "m"}, "input": {"path": "i"}, "output": {"path": "o"}, **sections}
    ).spec
    tokenizer = Tokenizer.load(folder)
    reasoning = spec.reasoning
    chosen = choose_format(reasoning.parser, tokenizer, start=reasoning.start, end=reasoning.end)
    chat = None
    if spec.prompt.raw is None:
        chat = ChatTemplate.load(folder, tokenizer, thinking=reasoning.thinking)
    return PromptMaker(
        spec,
        tokenizer=tokenizer,
        chat=chat,
        sampling=resolve_sampling(spec.sampling, {}, eos_ids=[1]),
        reasoner=Reasoner(tokenizer, chosen),
        columns=columns,
        limit_tokens=limit,
    )


def _row(index=0, error=None, **values) -> Row:
    return Row(
        index=index, file=0, number=index, id=str(index), typed_id=index, values=values, error=error
    )


def _text(maker, **values) -> str:
    made = maker.prompts([_row(**values)])[0]
    assert not isinstance(made, str), made
    return Tokenizer.decode(maker._tokenizer, made.token_ids).text


def _fault(maker, **values) -> str:
    made = maker.prompts([_row(**values)])[0]
    assert isinstance(made, str)
    return made


HEAD, TAIL = vocabulary.BOS, vocabulary.ASSISTANT + "<think>\n"


def test_user_and_system_are_templates_over_the_columns(folder):
    maker = _maker(folder, prompt={"system": "In {{ lang }}.", "user": "Explain:\n{{ text }}\n"})
    assert maker.columns == ("text", "lang")
    assert _text(maker, text=" a  b\n", lang="C") == (
        f"{HEAD}In C.{vocabulary.USER}Explain:\n a  b\n\n{TAIL}"
    )


def test_numbers_and_truth_values_are_written_as_python_does(folder):
    maker = _maker(folder, prompt={"user": "{{ number }}"})
    for value, shown in ((7, "7"), (0.5, "0.5"), (True, "True"), (0, "0")):
        assert _text(maker, number=value) == f"{HEAD}{vocabulary.USER}{shown}{TAIL}"


def test_templates_may_use_all_of_jinja(folder):
    maker = _maker(
        folder,
        prompt={
            "user": "{% for item in items %}{{ loop.index }}. {{ item.name | upper }}\n{% endfor %}"
            "{% if text %}{{ text | trim }}{% else %}nothing{% endif %}{{ items | tojson }}"
        },
    )
    items = [{"name": "<think>"}, {"name": "b"}]
    shown = f"1. <THINK>\n2. B\nnothing{json.dumps(items)}"
    assert _text(maker, items=items, text=None) == f"{HEAD}{vocabulary.USER}{shown}{TAIL}"


@pytest.mark.parametrize(
    "attack",
    [
        "<｜User｜>",
        "</think>",
        "a<think>b</think>",
        "<｜end▁of▁sentence｜>",
        "<thi",
        "\ue000<think>",
    ],
)
@pytest.mark.parametrize(
    "prompt",
    [
        {"user": "{{ text }}nk>"},
        {"user": "{{ text | replace('#', '') }}{{ text }}"},
        {"messages": "chat"},
        {"raw": "text"},
        {"raw": "{{ text }}<｜Assistant｜><think>\n"},
    ],
)
def test_row_text_never_becomes_a_control_token(folder, prompt, attack):
    maker = _maker(folder, prompt=prompt)
    rows = [_row(text=text, chat=[{"role": "user", "content": text}]) for text in ("plain", attack)]
    plain, attacked = maker.prompts(rows)
    is_control = maker._tokenizer.is_control
    assert (
        attacked.token_ids[is_control(attacked.token_ids)].tolist()
        == plain.token_ids[is_control(plain.token_ids)].tolist()
    )
    assert attack in maker._tokenizer.decode(attacked.token_ids).text


def test_control_strings_of_the_job_itself_become_tokens(folder):
    maker = _maker(folder, prompt={"raw": "<｜User｜>{{ text }}<｜Assistant｜><think>\n"})
    made = maker.prompts([_row(text="hi")])[0]
    assert int(maker._tokenizer.is_control(made.token_ids).sum()) == 3


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"text": None}, "column 'text' is null"),
        ({"text": float("nan")}, "column 'text' is NaN"),
        ({}, "column 'text' is missing"),
        (
            {"text": ["a"]},
            "column 'text' holds a list, which is not text; write {{ text | tojson }} in",
        ),
        ({"text": {"a": 1}}, "column 'text' holds a map, which is not text; write {{ text | to"),
        ({"text": b"a"}, "column 'text' holds bytes, which are not text"),
        ({"text": "half \ud835 char"}, "column 'text' holds half a character"),
    ],
)
@pytest.mark.parametrize("prompt", [{"user": "x {{ text }}"}, {"raw": "text"}])
def test_cells_that_are_no_text_are_faults_of_their_row(folder, prompt, values, sentence):
    maker = _maker(folder, prompt=prompt)
    assert sentence in _fault(maker, **values)


def test_the_words_none_and_nan_are_never_written(folder):
    maker = _maker(folder, prompt={"user": "{% if lang %}{{ lang }}{% endif %}{{ text }}"})
    assert "column 'text' is null" in _fault(maker, text=None, lang="C")
    assert "column 'text' is null" in _fault(maker, lang="C")
    assert _text(maker, text="a", lang=None) == f"{HEAD}{vocabulary.USER}a{TAIL}"
    maker = _maker(folder, prompt={"user": "{{ items[0].name }}{{ items }}"})
    assert "null" in _fault(maker, items=[{"name": None}])
    assert "would write a list or map" in _fault(maker, items=[{"name": "a"}])
    maker = _maker(folder, prompt={"user": "{{ text | default('nothing') }}{{ lang is none }}"})
    assert _text(maker, text=None, lang=None) == f"{HEAD}{vocabulary.USER}nothingTrue{TAIL}"


def test_a_fault_leaves_the_other_rows_alone(folder):
    maker = _maker(folder, prompt={"user": "{{ text }}"})
    made = maker.prompts(
        [
            _row(0, text="a"),
            _row(1, text=None),
            _row(2, error="line 3 is no JSON"),
            _row(3, text="b"),
        ]
    )
    assert [isinstance(one, str) for one in made] == [False, True, True, False]
    assert made[2] == "line 3 is no JSON"
    assert [made[0].index, made[3].index] == [0, 3]


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ({"user": "{{ txt }}"}, "prompt.user uses {{ txt }}: .*no column 'txt'; did you mean text"),
        ({"user": "a", "system": "{{ langs }}"}, "prompt.system .*did you mean lang"),
        ({"messages": "chats"}, "prompt.messages: 'chats': .*did you mean chat"),
        ({"raw": "txt"}, "prompt.raw: 'txt': .*did you mean text"),
        ({"raw": "{{ txt }}"}, "prompt.raw uses"),
        ({"user": "{% for %}"}, "prompt.user is not a valid template: line 1"),
    ],
)
def test_templates_that_fit_no_column_are_errors_of_the_job(folder, prompt, sentence):
    with pytest.raises(JobError, match=sentence.replace("{{", r"\{\{").replace("}}", r"\}\}")):
        _maker(folder, prompt=prompt)


def test_input_without_columns_has_no_rows_and_no_error(folder):
    for prompt in ({"user": "{{ text }}"}, {"messages": "chat"}, {"raw": "text"}):
        assert _maker(folder, columns=(), prompt=prompt).prompts([]) == []


def _chat(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_conversations_of_several_turns(folder):
    maker = _maker(folder, prompt={"messages": "chat"})
    talk = _chat(
        ("system", "Be brief."),
        ("user", "1+1?"),
        ("assistant", "<think>one and one</think>2"),
        ("user", " and +1? "),
    )
    assert _text(maker, chat=talk) == (
        f"{HEAD}Be brief.{vocabulary.USER}1+1?{vocabulary.ASSISTANT}2{vocabulary.EOS}"
        f"{vocabulary.USER} and +1? {TAIL}"
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    with_nulls = [{"role": "user", "content": parts, "name": None, "tool_calls": None}]
    assert _text(maker, chat=with_nulls) == f"{HEAD}{vocabulary.USER}one\ntwo{TAIL}"
    assert _text(maker, chat=_chat(("user", ""))) == f"{HEAD}{vocabulary.USER}{TAIL}"


@pytest.mark.parametrize(
    ("chat", "sentence"),
    [
        ([], "the conversation is empty"),
        (None, "column 'chat' is null"),
        ("hi", 'the text "hi", which is not a list of messages; to prompt with it use prompt.user'),
        ('[{"role": "user"}]', "if that is JSON, store it as a list of {role, content}"),
        (
            {"role": "user"},
            "holds a map, which is not a list of messages; to prompt with it use "
            'prompt.user: "{{ chat | tojson }}"',
        ),
        (True, "holds true, which is not a list"),
        (["hi"], "message 0 is not a map of role and content"),
        (_chat(("usr", "x")), 'message 0 has as its role the text "usr"; known are system'),
        ([{"role": ["user"], "content": "x"}], "message 0 has as its role a list"),
        ([{"content": "x"}], "message 0 has no role; known are"),
        (_chat(("user", None)), "message 0 has no content"),
        (_chat(("user", 7)), "its content is no text but the number 7"),
        (_chat(("user", [{"type": "image_url"}])), "a part that is not text"),
        (_chat(("user", "\ud800")), "half a character"),
        (_chat(("tool", "x"), ("user", "y")), "starts with a tool message"),
        (_chat(("user", "x"), ("assistant", "y")), "ends with an assistant message"),
    ],
)
def test_odd_conversations_are_faults(folder, chat, sentence):
    assert sentence in _fault(_maker(folder, prompt={"messages": "chat"}), chat=chat)


def test_what_the_template_refuses_is_a_fault(folder, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{{ raise_exception('only one turn') }}")
    spec = {"prompt": {"messages": "chat"}}
    maker = _maker(folder, **spec)
    maker._chat = ChatTemplate.load(folder, maker._tokenizer, override=own)
    assert "the chat template refuses the conversation: only one turn" in _fault(
        maker, chat=_chat(("user", "a"))
    )


@pytest.mark.parametrize("raw", ["text", "{{ text }}!"])
def test_fc_042_a_raw_row_that_begins_like_a_bos_is_reported_once(folder, raw, caplog):
    maker = _maker(folder, prompt={"raw": raw})
    rows = [_row(text=f"{vocabulary.BOS} {n}") for n in range(3)]
    bos = maker._tokenizer.bos_id
    assert all(bos not in made.token_ids for made in maker.prompts(rows))
    assert caplog.text.count("is text there and no BOS token") == 1


def test_fc_042_a_raw_template_may_write_the_bos(folder, caplog):
    maker = _maker(folder, prompt={"raw": f"{vocabulary.BOS}{{{{ text }}}}"})
    made = maker.prompts([_row(text="a")])[0]
    assert made.token_ids[0] == maker._tokenizer.bos_id
    assert "BOS" not in caplog.text


def test_raw_prompts_get_a_bos_only_where_the_tokenizer_adds_it(tmp_path):
    for adds_bos in (True, False):
        folder = vocabulary.byte_level(tmp_path / str(adds_bos), adds_bos=adds_bos)
        tokenizer = Tokenizer.load(folder)
        for source, value in (("text", "a"), ("{{ text }}", " a "), (HEAD + "{{ text }}", "a")):
            maker = _maker(folder, prompt={"raw": source})
            ids = maker.prompts([_row(text=value)])[0].token_ids.tolist()
            has_bos = adds_bos or source.startswith(HEAD)
            assert ids.count(tokenizer.bos_id) == int(has_bos)
            assert (ids[0] == tokenizer.bos_id) == has_bos


def test_empty_raw_prompts_are_faults_and_blank_ones_are_not(folder):
    maker = _maker(folder, prompt={"raw": "text"})
    assert _fault(maker, text="") == "the prompt is empty"
    assert _text(maker, text="  \n") == "  \n"


def test_too_long_says_the_length_and_the_limit(folder):
    rows = {"text": "a" * 50}
    size = len(_maker(folder, prompt={"raw": "text"}).prompts([_row(**rows)])[0].token_ids)
    for limit, is_fine in ((size + 1, True), (size, False), (size - 1, False)):
        maker = _maker(folder, limit=limit, prompt={"raw": "text"})
        if is_fine:
            assert _text(maker, **rows) == rows["text"]
        else:
            assert f"too long: {size} tokens, at most {limit - 1} fit" in _fault(maker, **rows)


def test_huge_rows_are_refused_without_tokenising(folder, monkeypatch):
    maker = _maker(folder, limit=100, prompt={"raw": "text"})

    def fail(texts):
        assert not texts

    monkeypatch.setattr(maker._tokenizer, "encode_batch", lambda texts: fail(texts) or [])
    assert "the prompt is too long: at least" in _fault(maker, text="ab" * 1_000_000)


def test_budget_with_message(folder):
    maker = _maker(
        folder,
        prompt={"raw": "{{ text }}<think>"},
        reasoning={"budget": 5, "budget_message": " So"},
    )
    tokenizer = maker._tokenizer
    budget = maker.prompts([_row(text="a")])[0].params.budget
    end = tokenizer.control_id("</think>")
    assert budget.max_reasoning_tokens == 5 and budget.is_open
    assert budget.end_ids == (end,) and budget.start_ids == (tokenizer.control_id("<think>"),)
    assert budget.forced_ids == (*tokenizer.encode_plain(" So").tolist(), end)
    closed = _maker(folder, prompt={"raw": "text"}, reasoning={"budget": 0})
    budget = closed.prompts([_row(text="a <think>")])[0].params.budget
    assert not budget.is_open and budget.max_reasoning_tokens == 0
    assert budget.forced_ids == (end,)


def test_budget_share(folder):
    fixed = _maker(
        folder,
        prompt={"user": "{{ text }}"},
        reasoning={"budget_share": 0.3},
        sampling={"max_tokens": 25},
    )
    assert fixed.prompts([_row(text="a")])[0].params.budget.max_reasoning_tokens == 7
    rest = _maker(folder, limit=100, prompt={"user": "{{ text }}"}, reasoning={"budget_share": 0.5})
    for text in ("a", "a b c d e f"):
        made = rest.prompts([_row(text=text)])[0]
        assert made.params.budget.max_reasoning_tokens == (100 - len(made.token_ids)) // 2


def test_a_budget_without_room_for_an_answer_is_warned_of(folder, caplog):
    prompt = {"user": "{{ text }}"}
    _maker(folder, prompt=prompt, reasoning={"budget": 8}, sampling={"max_tokens": 8})
    assert "leave no room for an answer" in caplog.text
    caplog.clear()
    _maker(folder, prompt=prompt, reasoning={"budget": 8}, sampling={"max_tokens": 80})
    assert not caplog.text


def test_budgets_need_marker_tokens(folder, tmp_path):
    plain = vocabulary.byte_level(tmp_path, plain=())
    prompt = {"raw": "text"}
    with pytest.raises(JobError, match=r"reasoning\.budget: the model has no reasoning markers"):
        _maker(plain, prompt=prompt, reasoning={"budget": 5})
    with pytest.raises(
        JobError, match=r"budget_share: the markers \[T\] and \[/T\] must be tokens"
    ):
        own = {"start": "[T]", "end": "[/T]", "budget_share": 0.5}
        _maker(folder, prompt=prompt, reasoning=own)


def test_chat_prompts_need_a_template(tmp_path):
    folder = vocabulary.byte_level(tmp_path, template=None)
    with pytest.raises(JobError, match=r"no chat template.*prompt\.raw"):
        _maker(folder, prompt={"user": "{{ text }}"})


def test_random_streams_differ_by_seed_row_type_and_sample():
    base = stream_key(0, "7", 0)
    keys = {base, stream_key(1, "7", 0), stream_key(0, 7, 0), stream_key(0, "7", 1)}
    keys |= {stream_key(0, "8", 0), stream_key(-1, "7", 0), stream_key(0, "\ud800", 0)}
    assert len(keys) == 7 and all(0 <= key < 2**64 for key in keys)
    assert base == 0xC055D1DEE400B22A  # pinned: a changed key would change every sampled row


def test_prompts_do_not_depend_on_their_batch(folder):
    maker = _maker(folder, prompt={"user": "{{ text }}"}, sampling={"seed": 3})
    rows = [_row(n, text=text) for n, text in enumerate(["a", "b <think>", " c ", "東京 🙂"])]
    together = maker.prompts(copy.deepcopy(rows))
    for row, made in zip(rows, together, strict=True):
        alone = maker.prompts([row])[0]
        assert np.array_equal(alone.token_ids, made.token_ids)
        assert (alone.stream_key, alone.params) == (made.stream_key, made.params)
        assert made.token_ids.dtype == np.int32 and not made.token_ids.flags.writeable


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ text * n }}", "write more than 16,777,216 characters"),
        ("{{ n * 'x' }}", "write more than 16,777,216 characters"),
        ("{{ [text] * n }}", "write more than 16,777,216 characters"),
        ("{{ text.center(n) }}", "write more than 16,777,216 characters"),
        ("{{ text | indent(n) }}", "write more than 16,777,216 characters"),
        ("{{ ('%' ~ n ~ 's') % text }}", "write more than 16,777,216 characters"),
        ("{{ ('%' ~ n ~ 's') | format(text) }}", "write more than 16,777,216 characters"),
        ("{{ ('{:' ~ n ~ '}').format(text) }}", "write more than 16,777,216 characters"),
        ("{{ text }}{{ n ** n }}", "a power has more than 4096 digits"),
        (
            "{% for i in range(999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{{ n }}",
            "its ranges have more than 1,000,000 numbers",
        ),
        (
            "{% for i in range(9999) %}{{ '%9999s' % text }}{% endfor %}",
            "write more than 16,777,216 characters",
        ),
    ],
)
def test_no_template_runs_or_grows_without_end(folder, template, sentence):
    maker = _maker(folder, columns=("text", "n"), prompt={"raw": template})
    assert sentence in _fault(maker, text="a", n=10**9)


def test_bounds_leave_ordinary_templates_alone(folder):
    maker = _maker(
        folder,
        columns=("text", "n"),
        prompt={"raw": "{{ text.format('x') }}{{ '-' * n }}{{ n ** 2 }}{{ text.center(n) }}"},
    )
    for _ in range(3):
        assert _text(maker, text="a{}", n=6) == "ax------36 a{}  "
    loop = _maker(folder, prompt={"raw": "{% for i in range(60000) %}{% endfor %}{{ text }}"})
    for _ in range(20):  # the limit is that of one rendering
        assert _text(loop, text="a") == "a"


def test_sampling_values_come_from_the_rows_columns(folder):
    sampling = {"temperature": {"column": "number"}, "seed": {"column": "items"}, "top_k": 3}
    maker = _maker(folder, prompt={"raw": "text"}, sampling=sampling)
    assert maker.columns == ("text", "number", "items")
    rows = [
        _row(0, text="a", number=0.5, items=1),
        _row(1, text="a", number=None, items=None),
        _row(2, text="a", number="hot", items=1),
    ]
    own, plain, fault = maker.prompts(rows)
    assert (own.params.temperature, own.params.top_k) == (0.5, 3)
    assert own.stream_key == stream_key(1, 0, 0)
    assert (plain.params.temperature, plain.stream_key) == (1.0, stream_key(0, 1, 0))
    assert fault == (
        "sampling.temperature from column 'number': 'hot' is out of range; it must be 0 or more"
    )


def test_a_budget_share_follows_the_rows_own_max_tokens(folder):
    sampling = {"max_tokens": {"column": "number"}}
    reasoning = {"budget_share": 0.5}
    maker = _maker(
        folder, limit=200, prompt={"user": "{{ text }}"}, sampling=sampling, reasoning=reasoning
    )
    few, rest = maker.prompts([_row(0, text="a", number=40), _row(1, text="a", number=None)])
    assert few.params.budget.max_reasoning_tokens == 20
    assert rest.params.budget.max_reasoning_tokens == (200 - len(rest.token_ids)) // 2
